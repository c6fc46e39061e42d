"""Two processes load a Hub folder onto one mesh, each reading its slices, and write it back together."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxflash.hf.load import open_checkpoint
from tests.jaxflash.hf.test_golden import raw
from tests.jaxflash.hf.tiny import GOLDEN

SCRIPT = """
import dataclasses, json, sys
import jax, jaxflash
jaxflash.use_cpu_devices(4)
address, index, source, out, report = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index), initialization_timeout=60)
from pathlib import Path
from jaxflash.hf.load import load_params, open_checkpoint
from jaxflash.language_model import LanguageModel, save
from jaxflash.tokenizer import NoTokenizer
checkpoint, read = open_checkpoint(Path(source)), {}

def counting(tensor):
    def wrapped(index):
        values = tensor.read(index)
        read[tensor.name] = read.get(tensor.name, 0) + values.nbytes
        return values
    return dataclasses.replace(tensor, read=wrapped)

stored = {name: counting(tensor) for name, tensor in checkpoint.stored.items()}
mesh = jaxflash.make_mesh({"fsdp": 4, "tensor": 2})
config, params = load_params(dataclasses.replace(checkpoint, stored=stored), mesh)
save(LanguageModel(config, params, NoTokenizer(source)), out, max_shard_bytes=20_000)
Path(report).write_text(json.dumps(read))  # not printed: the collectives' library prints too
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_read_half_each_and_write_one_folder(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    folder, reports = tmp_path / "folder", [tmp_path / f"{i}.json" for i in range(2)]
    folder.mkdir()
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                address,
                str(i),
                str(GOLDEN / "qwen3"),
                str(folder / "out"),
                str(reports[i]),
            ],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [child.communicate(timeout=250) for child in children]
    assert all(child.returncode == 0 for child in children), outputs[0][1][-2000:] + outputs[1][1][-2000:]
    first, second = (json.loads(report.read_text()) for report in reports)
    for name, tensor in open_checkpoint(GOLDEN / "qwen3").stored.items():
        whole = name.endswith(("q_norm.weight", "k_norm.weight"))  # a head is not split
        assert first[name] == second[name] == (tensor.nbytes if whole else tensor.nbytes // 2), name
    assert raw(folder / "out") == raw(GOLDEN / "qwen3")
    assert [path.name for path in folder.iterdir()] == ["out"]
