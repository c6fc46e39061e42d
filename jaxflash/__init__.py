"""jaxflash: attention, low-bit matmuls and large-model training in JAX."""

from jaxflash.config import ModelConfig as ModelConfig
from jaxflash.config import RopeScaling as RopeScaling
from jaxflash.config import Sampling as Sampling
from jaxflash.config import TrainConfig as TrainConfig
from jaxflash.config import override as override
from jaxflash.config import preset as preset
from jaxflash.config import train_preset as train_preset
from jaxflash.demo import demo as demo
from jaxflash.demo import demo_config as demo_config
from jaxflash.generate import generate as generate
from jaxflash.language_model import LanguageModel as LanguageModel
from jaxflash.language_model import load as load
from jaxflash.model import KVCache as KVCache
from jaxflash.model import Transformer as Transformer
from jaxflash.plot import loss_curve as loss_curve
from jaxflash.train import Run as Run
from jaxflash.train import train as train
from pallas_kernels.attention.api import dot_product_attention as dot_product_attention
from pallas_kernels.attention.api import explain as explain
from pallas_kernels.dispatch import Unsupported as Unsupported
from sharding.mesh import make_mesh as make_mesh
from sharding.mesh import use_cpu_devices as use_cpu_devices
