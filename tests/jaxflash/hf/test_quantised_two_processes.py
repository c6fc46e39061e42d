"""Two processes load a quantised folder onto one mesh, each reading the codes of its columns, and write it back."""

import dataclasses
import json

import pytest

from jaxflash.language_model import save
from tests.jaxflash.hf.quantised import CONFIG, packed
from tests.processes import run_together, script

SCRIPT = """
import dataclasses, json, sys
import jax, jaxflash
jaxflash.use_cpu_devices(4)
address, index, source, out, reports = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index), initialization_timeout=60)
from pathlib import Path
from jaxflash.hf.load import load_params, open_checkpoint
from jaxflash.language_model import LanguageModel, save
from jaxflash.tokenizer import ByteTokenizer
checkpoint, read = open_checkpoint(Path(source)), {}

def counting(linear):
    words = linear.tensors["qweight"]
    def wrapped(index):
        values = words.read(index)
        read[words.name] = read.get(words.name, 0) + values.nbytes
        return values
    return dataclasses.replace(linear, tensors={**linear.tensors, "qweight": dataclasses.replace(words, read=wrapped)})

linears = {name: counting(linear) for name, linear in checkpoint.linears.items()}
mesh = jaxflash.make_mesh({"fsdp": 2, "tensor": 4})
config, params = load_params(dataclasses.replace(checkpoint, linears=linears), mesh)
save(LanguageModel(config, params, ByteTokenizer()), out, format="gptq")
Path(reports, f"{index}.json").write_text(json.dumps(read))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_read_their_columns_and_write_one_folder(tmp_path):
    config = dataclasses.replace(CONFIG, n_layers=1, d_model=128, n_heads=8, n_kv_heads=8, head_dim=32, d_ff=256)
    save(packed("asymmetric", config)[0], tmp_path / "x", format="gptq")
    run_together(script(SCRIPT, tmp_path / "x", tmp_path / "y", tmp_path), timeout=120, writes=tmp_path / "y")
    for i in range(2):
        read = json.loads((tmp_path / f"{i}.json").read_text())
        for name, whole in ((".mlp.down_proj", 256 * 128), (".mlp.up_proj", 128 * 256)):
            # Columns of down lie over fsdp, which splits processes; those of up over tensor, which each has all of.
            share = 2 if "down" in name else 1
            assert read[f"model.layers.0{name}.qweight"] == whole // 2 // share
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "xy"]
    assert files[0] == files[1]
