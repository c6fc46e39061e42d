"""Documents from text and JSONL files."""

import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

_SUFFIXES = (".txt", ".jsonl")
# JSON can spell half a surrogate pair (\ud83d), which no UTF-8 text and no tokenizer can hold.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def shipped_corpus() -> Path:
    """The corpus that comes with the package: 167 scenes of Shakespeare, 1.07 MB of text (see corpus/README.md)."""
    return Path(str(resources.files("jaxflash.corpus") / "shakespeare.jsonl"))


def find_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """The .txt and .jsonl files that `paths` name: files, folders (searched to any depth) and globs (`**` too).

    The order is that of `paths`, sorted by name within a folder or glob; a file reached twice counts once, so that no
    document can stand on both sides of the validation split.

    Raises:
      FileNotFoundError: a path, folder or glob that gives no file.
      ValueError: no paths, a file of another type, an empty file.
    """
    if not paths:
        raise ValueError("data: no paths given - name a .txt or .jsonl file, a folder or a glob, or pass data=None.")
    files: dict[Path, Path] = {}
    for path in paths:
        for file in _expand(Path(path).expanduser()):
            files.setdefault(file.resolve(), file)
    for file in files.values():
        if file.suffix not in _SUFFIXES:
            raise ValueError(f"data: {file} is neither .txt nor .jsonl - only these are read. Convert or rename it.")
        if file.stat().st_size == 0:
            raise ValueError(f"data: {file} is empty - every file must hold text. Remove it, or leave it out.")
    return tuple(files.values())


def _expand(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not found:
            raise FileNotFoundError(f"data: folder {path} holds no .txt or .jsonl file - name one that does.")
        return found
    if any(letter in str(path) for letter in "*?["):
        relative = path.relative_to(path.anchor)
        found = sorted(file for file in Path(path.anchor).glob(str(relative)) if file.is_file())
        if not found:
            raise FileNotFoundError(f"data: no file matches the glob {path} - check the pattern and the folder.")
        return found
    raise FileNotFoundError(f"data: {path} does not exist - name a .txt or .jsonl file, a folder or a glob.")


def read_documents(paths: Sequence[str | Path]) -> Iterator[str]:
    """The documents of `paths` (see `find_files`), one at a time; empty documents are left out.

    A .txt file is one document, whatever its size, and is held in memory whole. A .jsonl file holds one
    `{"text": ...}` object a line (other keys are ignored, blank lines skipped) and is read line by line, so a large
    corpus belongs in JSONL. Text is UTF-8 and is passed on as it stands, line ends included; a byte order mark is cut.

    Raises:
      FileNotFoundError, ValueError: as `find_files`; and text that is not UTF-8, a broken line, a missing "text",
        each with file and line.
    """
    for file in find_files(paths):
        yield from filter(None, _read_lines(file) if file.suffix == ".jsonl" else _read_text(file))


def _read_text(file: Path) -> Iterator[str]:
    try:
        yield file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {file} is not UTF-8 at byte {error.start} - convert it, e.g. with iconv.") from error


def _read_lines(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError
                raise ValueError(
                    f"data: {file}:{number} is not JSON ({error}) - one object a line is needed."
                ) from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                held = f"an object with keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
                raise ValueError(f'data: {file}:{number} holds {held} - each line needs a string at "text".')
            if _HALF_PAIR.search(text):
                raise ValueError(f"data: {file}:{number} holds half a surrogate pair - write the whole character.")
            yield text
