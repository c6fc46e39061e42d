"""Run folders and their checkpoints (orbax): atomic, asynchronous, restored on any mesh.

DIR/config.json        the run's TrainConfig
DIR/metrics.jsonl      one line a report
DIR/tokenizer.json     when the tokenizer is not the bytes
DIR/checkpoints/STEP/  params, opt_state (apart, so that a reader of the model reads no optimizer) and meta

4-bit weights are saved as their packed arrays, and meta says of what shapes and groups they are.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxflash import config as configs
from jaxflash.atomic import write_atomically
from jaxflash.config import TrainConfig
from quant.tensor import Int4Tensor

# Of a model's 4-bit weights by their places in the parameters: their shapes, and those of their arrays.
type Packed = Mapping[tuple[str, ...], Int4Tensor]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training step changes: parameters, optimizer state, and the number of steps taken (int32 scalar)."""

    params: Any
    opt_state: Any
    step: Any


class Checkpoints:
    """The checkpoints of one run folder; keeps the newest `keep`. A context manager: leaving waits for writes."""

    def __init__(self, run: Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        # Handlers named here, so that metadata can be read before anything is restored.
        handlers = {
            "params": ocp.StandardCheckpointHandler(),
            "opt_state": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        folder = (run / "checkpoints").absolute()
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint; half-written ones do not count."""
        return self._manager.latest_step()

    def save(self, state: TrainState, step: int, *, data: str) -> None:
        """Starts writing `state`; returns once it is safe to donate it.

        step: steps taken, which is also the position in the data, since batch n is a function of (seed, n).
        data: the fingerprint of the dataset that it is a position in. A failed write is raised by the next `save` or on
        leaving, never swallowed.
        """
        if step == self.latest:
            return
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            meta=ocp.args.JsonSave({"step": step, "data": data}),
        )
        self._manager.check_for_errors()
        self._manager.save(step, args=items)

    def restore(self, abstract: TrainState, step: int, *, data: str) -> TrainState:
        """The state saved at `step`, bit for bit, laid out as `abstract`'s shardings say.

        Raises:
          ValueError: it is of another model, or its position is one in another dataset than `data`.
        """
        _check_shapes(self._manager.item_metadata(step)["params"], abstract.params, step)
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if meta["data"] != data:
            raise ValueError(
                f"train: the checkpoint of step {step} was trained on other data or another tokenizer (the files have "
                "changed since). Give the same text back, or start a new run in another --out."
            )
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params), opt_state=ocp.args.StandardRestore(abstract.opt_state)
        )
        out = self._manager.restore(step, args=items)
        count = jax.device_put(jnp.asarray(meta["step"], jnp.int32), abstract.step.sharding)
        return TrainState(out["params"], out["opt_state"], count)

    def packed(self, step: int) -> Packed:
        """The 4-bit weights among the parameters saved at `step`; no array is read."""
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        saved, found = self._manager.item_metadata(step)["params"], {}
        for name, facts in meta.get("packed", {}).items():
            path = tuple(name.split("/"))
            arrays = functools.reduce(lambda node, key: node[key], path, saved)
            arrays = {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in arrays.items() if a is not None}
            found[path] = Int4Tensor(**arrays, shape=tuple(facts["shape"]), group=facts["group"])
        return found

    def restore_params(self, abstract: Any, step: int) -> Any:
        """Only the parameters saved at `step`."""
        _check_shapes(self._manager.item_metadata(step)["params"], abstract, step)
        return self._manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract)))["params"]


# What a run keeps in its folder beside config.json.
_OURS = ("metrics.jsonl", "tokenizer.json", "tokenizer_config.json", "checkpoints")


def open_run(run: Path, config: TrainConfig) -> None:
    """Makes `run` the folder of `config`, or checks that it already is; other files in it are left alone.

    A folder whose run has no checkpoint yet takes another configuration: nothing would be lost.

    Raises:
      ValueError: the folder holds a run of another configuration (the differing keys are named) or one that has gone
        further than `config.steps`; or it is no run's and holds files by the names that a run writes.
      NotADirectoryError: the path is a file.
    """
    if run.exists() and not run.is_dir():
        raise NotADirectoryError(f"train: out={str(run)!r} is a file - a folder is required. Choose another --out.")
    # Looked for before config.json, which a run writes first: another process of this run may be writing both now.
    foreign = [name for name in _OURS if (run / name).exists()]
    steps = saved_steps(run)
    if (run / "config.json").exists():
        changed = configs.differences(read_config(run), config) if steps else {}
        if changed:
            listed = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in sorted(changed.items()))
            schedule = changed.get("schedule_steps")
            hint = "" if schedule is None else f" schedule_steps={schedule[0]} keeps its learning rate."
            raise ValueError(
                f"train: {str(run)!r} holds a run of another configuration ({listed}). "
                f"Continue it with the same settings, or choose another --out.{hint}"
            )
        if steps and steps[-1] > config.steps:
            raise ValueError(
                f"train: {str(run)!r} is already at step {steps[-1]}, beyond steps={config.steps}. "
                "Ask for more steps, or choose another --out."
            )
    elif foreign:
        raise ValueError(
            f"train: {str(run)!r} has no config.json, so is no run, but holds {', '.join(foreign)}, which a "
            "run would write over. Choose another --out."
        )
    if jax.process_index() == 0:
        run.mkdir(parents=True, exist_ok=True)
        write_atomically(run / "config.json", configs.to_json(config))


def saved_steps(run: Path) -> list[int]:
    """The steps of which a run folder has whole checkpoints, ascending."""
    folder = run / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def read_config(run: Path) -> TrainConfig:
    """The configuration of a run folder.

    Raises:
      FileNotFoundError: no such folder, or none that `train` made.
      ValueError: the file is not a configuration of this version.
    """
    path = run / "config.json"
    if not path.is_file():
        what = "is not a run folder (no config.json)" if run.exists() else "does not exist"
        raise FileNotFoundError(
            f"load: {str(run)!r} {what}. Give the folder that `jaxflash train --out` "
            "wrote, a Hugging Face folder or a .gguf file."
        )
    try:
        return configs.from_json(path.read_text())
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"load: {str(path)!r} is not a run's configuration: {error}") from error


def packed_facts(params: Any) -> dict[str, Any]:
    """What meta says of the 4-bit weights in `params`; their arrays say the rest."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Int4Tensor))
    return {
        "/".join(_keys(path)): {"shape": list(leaf.shape), "group": leaf.group}
        for path, leaf in leaves
        if isinstance(leaf, Int4Tensor)
    }


def packed_weights(run: Path) -> Packed:
    """The 4-bit weights of the newest checkpoint of a run folder, none where it has none; no array is read."""
    steps = saved_steps(run)
    if not steps:
        return {}
    with Checkpoints(run, keep=len(steps) + 1) as checkpoints:
        return checkpoints.packed(steps[-1])


def load_params(run: Path, abstract: Callable[[Packed], Any], step: int | None = None) -> tuple[Any, int]:
    """Parameters of a run folder at `step` (None: the newest), laid out as `abstract` says, and the step.

    abstract: the shapes and shardings of the parameters, given the 4-bit weights among them.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      ValueError: the checkpoint is of another model.
    """
    steps = saved_steps(run)
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"load: {str(run)!r} has {wanted}; it has {steps}. Train it first, or choose one.")
    with Checkpoints(run, keep=len(steps) + 1) as checkpoints:
        chosen = steps[-1] if step is None else step
        return checkpoints.restore_params(abstract(checkpoints.packed(chosen)), chosen), chosen


def _check_shapes(saved: Any, wanted: Any, step: int) -> None:
    """Compares before orbax starts: its own error comes with thousands of lines of noise, and dtypes cast silently."""
    have, want = (
        {"".join(f"[{key!r}]" for key in path): (tuple(v.shape), str(jnp.dtype(v.dtype))) for path, v in leaves}
        for leaves in (_leaves(saved), _leaves(wanted))
    )
    wrong = sorted(k for k in have | want if have.get(k) != want.get(k))
    if wrong:
        key = wrong[0]
        raise ValueError(
            f"load: the checkpoint of step {step} is of another model: {len(wrong)} parameters differ, first {key}: "
            f"{have.get(key)} saved, {want.get(key)} wanted. Use the configuration that the checkpoint was made with."
        )


def _leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    return [(_keys(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _keys(path: Any) -> tuple[str, ...]:
    """Names alone, whether of a dict's keys or of a tensor's arrays, which orbax saves as a dict."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
