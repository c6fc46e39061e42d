"""Two processes load a Hub folder onto one mesh, each reading its slices, and write it back together; where one alone
cannot write, both are told, and neither waits."""

import json

import pytest
from safetensors.numpy import load_file

from jaxflash.hf.load import open_checkpoint
from tests.jaxflash.hf.test_golden import raw
from tests.jaxflash.hf.tiny import GOLDEN, copy, rewrite
from tests.processes import run_together, script

SCRIPT = """
import dataclasses, json, resource, shutil, sys, types
import jax, jaxflash
jaxflash.use_cpu_devices(4)
address, index, source, tied, out, reports = sys.argv[1:]
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

# A tied model whose second head is another one. Small as it is, one process reads it, and both must know.
model, refused, first = LanguageModel(config, params, NoTokenizer(source)), [], index == "0"
try:
    load_params(open_checkpoint(Path(tied)), jaxflash.make_mesh({"data": 8}))
except ValueError as error:
    refused.append(str(error))

# What can go wrong in the first process alone: no room, and a file that cannot grow (as on a full disk).

def attempt():
    try:
        save(model, out)
    except OSError as error:
        refused.append(str(error))

usage = shutil.disk_usage
if first:
    shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)
attempt()
shutil.disk_usage = usage
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if first:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
attempt()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
if not first:  # what only the others see decides nothing
    shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)
save(model, out, max_shard_bytes=20_000)
Path(reports, f"{index}.json").write_text(json.dumps({"read": read, "refused": refused}))  # their library prints too
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_read_half_each_and_write_one_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    tied = copy("qwen2", tmp_path)
    table = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tied / "model.safetensors", lm_head__weight=table + 1)
    run_together(script(SCRIPT, GOLDEN / "qwen3", tied, folder / "out", tmp_path), timeout=120, writes=folder)
    told = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    first, second = (report["read"] for report in told)
    for name, tensor in open_checkpoint(GOLDEN / "qwen3").stored.items():
        whole = name.endswith(("q_norm.weight", "k_norm.weight"))  # a head is not split
        assert first[name] == second[name] == (tensor.nbytes if whole else tensor.nbytes // 2), name
    (other_head, no_room, full), (others_head, others_room, others_full) = (report["refused"] for report in told)
    assert other_head == others_head and "'lm_head.weight' is not the embedding table" in other_head
    assert "free=1000 bytes" in no_room and "File too large" in full
    assert "the first process could not make" in others_room and "the first process could not write" in others_full
    assert raw(folder / "out") == raw(GOLDEN / "qwen3")
    assert [path.name for path in folder.iterdir()] == ["out"]
