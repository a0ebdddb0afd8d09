"""Changes of weights and drafters in a running model, and state dicts written as checkpoints.

The ranks load every change from a folder, with the code that loads weights at the start. Ranks and
engines that replace them later do the same. A state dict is therefore written to a folder first.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..config import ComposeConfig, EngineConfig, NoSpeculation, SpeculationBase
from ..config.compat.translate import translate_section
from ..config.speculation import SHARED_KEYS
from ..errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    OutriderError,
    renamed,
    shown_value,
)
from ..workers.model.checkpoint.hub import require_name
from ..workers.spec import SentWeights, TrainerLink
from .checkpoints import trust

if TYPE_CHECKING:
    from torch import Tensor

    Weights = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of running requests. abort: they end with the finish reason "abort"; wait: they end
normally; keep: they continue afterwards. Waiting requests continue afterwards in the last two."""

SLEEP_TAGS = ("weights", "kv_cache")  # in the order in which they are needed

_OF_COMPOSITION = ("mode", "keep_order", "max_draft_len")
_RULE = tuple(key for key in SHARED_KEYS if key not in SpeculationBase.of_load)
_FILE_BYTES = 4 << 30  # size of one file of a checkpoint
_KNOCK_S = 0.1  # between attempts to connect to a trainer
_COPIED = ("*.json", "*.py", "*.jinja", "*.model", "*.txt")
_INDEX = ".safetensors.index.json"


def checked_mode(mode: Any) -> PauseMode:
    """Returns `mode` if it is valid; raises `InvalidRequestError` otherwise."""
    if mode not in get_args(PauseMode):
        allowed = ", ".join(map(repr, get_args(PauseMode)))
        raise InvalidRequestError.at("mode", f"expected one of {allowed}, got {mode!r}")
    found: PauseMode = mode
    return found


def checked_sleep(level: Any) -> int:
    """Returns `level` if it is valid; raises `InvalidRequestError` otherwise."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidRequestError.at("level", f"expected 1 or 2, got {shown_value(level)}")
    return level


def checked_tags(tags: Any) -> tuple[str, ...]:
    """Returns the tags to wake; None: all. Raises `InvalidRequestError` for others."""
    given = SLEEP_TAGS if tags is None else tags
    if (
        not isinstance(given, (list, tuple))
        or not given
        or any(each not in SLEEP_TAGS for each in given)
    ):
        raise InvalidRequestError.at(
            "tags", f"expected some of {list(SLEEP_TAGS)}, got {shown_value(tags)}"
        )
    return tuple(given)


def checked_link(link: TrainerLink, num_ranks: Sequence[int]) -> list[TrainerLink]:
    """Returns the link of each engine, so that all engines join one group of the trainer.

    Args:
        link: has the rank of the first engine's first rank.
        num_ranks: ranks of each engine in the order in which they join; 0: it cannot join.

    Raises:
        InvalidRequestError, ConfigError: an argument is invalid.
    """
    if not all(num_ranks):
        raise ConfigError.at(
            "pipeline_parallel_size", "weights are sent to targets of one stage only"
        )
    first, end = link.rank_offset, link.rank_offset + sum(num_ranks)
    if first < 1 or end > link.world_size:
        engines = "this engine" if len(num_ranks) == 1 else f"{len(num_ranks)} engines"
        raise InvalidRequestError.at(
            "rank_offset",
            f"ranks {first} to {end - 1} of {engines}, in a group of {link.world_size} whose rank "
            "0 is the trainer's",
        )
    if link.backend not in ("gloo", "nccl") or not link.name:
        name, given = ("backend", link.backend) if link.name else ("group_name", link.name)
        raise InvalidRequestError.at(name, f"{given!r}; backends are 'gloo' and 'nccl'")
    starts = accumulate(num_ranks, initial=first)
    return [replace(link, rank_offset=start) for start, _ in zip(starts, num_ranks)]


def await_trainer(link: TrainerLink) -> None:
    """Waits until the trainer listens at its address.

    Raises:
        ConfigError: it did not within the link's timeout, or the address is invalid.
    """
    if not 0 < link.port < 1 << 16:
        raise ConfigError.at("master_port", f"{link.port} is no port")
    end = time.monotonic() + link.timeout_s
    while True:
        try:
            left = max(end - time.monotonic(), _KNOCK_S)
            socket.create_connection((link.host, link.port), left).close()
            return
        except UnicodeError as error:
            raise ConfigError.at("master_address", f"{link.host!r}: {error}") from None
        except OSError as error:
            if time.monotonic() + _KNOCK_S >= end:
                raise ConfigError.at(
                    "master_address",
                    f"no process group with the trainer: nobody listened at {link.host}:{link.port}"
                    f" within {link.timeout_s:g} s ({error.strerror or error})",
                ) from None
        time.sleep(_KNOCK_S)


def sent_weights(
    group: str,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    version: str = "",
) -> SentWeights:
    """Describes weights that a trainer sends; dtypes are torch's or their names."""
    kinds = tuple(str(each).removeprefix("torch.") for each in dtypes)
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return SentWeights(group, tuple(names), kinds, sizes, version=version)


@dataclass(slots=True)
class Change:
    """A change that the engine's thread performs between two steps.

    Args:
        mode: treatment of the requests that are running then.
        perform: performs the change once no step is running; raises `OutriderError` on failure.
        done: called in the engine's thread with the error, or None.
    """

    mode: PauseMode
    perform: Callable[[], None]
    done: Callable[[OutriderError | None], None]


@dataclass
class SavedStates:
    """State dicts written as checkpoint folders, which are kept as long as they are served.

    The folders are created in Python's folder for temporary files (`TMPDIR`). Ranks on other nodes
    must see them at the same path.
    """

    _kept: dict[str, Path] = field(default_factory=dict)  # keyed by "weights" and "drafter"

    def folder(
        self, weights: Weights, beside: str, name: str, scales: Mapping[str, Tensor] | None = None
    ) -> tuple[str, Path | None]:
        """Returns the absolute folder of `weights`, and that folder again if it was created here.

        Args:
            beside: folder of the weights that are replaced, whose configuration is copied.
            name: name of the argument, for errors.
            scales: KV-cache scales, which are kept if the tensors include none.

        Raises:
            InvalidRequestError: `weights` are neither a path nor named tensors.
            CheckpointError: the folder cannot be written, or the path is not a valid name.
        """
        if isinstance(weights, (str, Path)):
            if not str(weights):
                raise InvalidRequestError.at(name, "the path is empty")
            require_name(str(weights), name)
            return str(Path(weights).resolve()), None
        made = Path(tempfile.mkdtemp(prefix="outrider-weights-"))
        try:
            for pattern in _COPIED:
                for file in Path(beside).glob(pattern):
                    if not file.name.endswith(_INDEX):
                        shutil.copyfile(file, made / file.name)
            _write(_with_scales(_pairs(weights, name), scales or {}), made, name)
        except OSError as error:
            self.drop(made)
            raise CheckpointError.at(name, f"cannot be written to {str(made)!r}: {error}") from None
        except BaseException:
            self.drop(made)
            raise
        return str(made), made

    def keep(self, name: str, made: Path | None) -> None:
        """Keeps the folder of `name`, which is now served, and removes the previous one."""
        self.drop(self._kept.pop(name, None))
        if made is not None:
            self._kept[name] = made

    def drop(self, made: Path | None) -> None:
        """Removes a folder that was created here."""
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)

    def close(self) -> None:
        """Removes all folders."""
        while self._kept:
            self.drop(self._kept.popitem()[1])


def kept_scales(config: EngineConfig, folder: str) -> Mapping[str, Tensor]:
    """Returns the KV-cache scales of the served target in `folder`, by tensor name.

    Raises:
        CheckpointError: the folder is no longer a valid checkpoint.
    """
    from ..workers.model.checkpoint.weights import Checkpoint

    if config.kv_cache_dtype == "auto":
        return {}
    return Checkpoint(Path(folder), **trust(config)).kv_scale_tensors()


def _pairs(weights: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of a state dict in either form."""
    from torch import Tensor

    if not isinstance(weights, Iterable) or isinstance(weights, (bytes, bytearray, Tensor)):
        kind = type(weights).__name__
        raise InvalidRequestError.at(
            name, f"expected a path, a state dict or pairs of name and tensor, got {kind}"
        )
    for entry in weights.items() if isinstance(weights, Mapping) else weights:
        match entry:
            case (str(), Tensor()):
                yield entry
            case (str(key), value):
                kind = type(value).__name__
                raise InvalidRequestError.at(name, f"{key!r} is no tensor, but {kind}")
            case _:
                kind = type(entry).__name__
                raise InvalidRequestError.at(name, f"expected pairs of name and tensor, got {kind}")


def _with_scales(
    pairs: Iterable[tuple[str, Tensor]], scales: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the pairs, then `scales` if the pairs have no KV scales."""
    from ..workers.model.checkpoint.weights import is_kv_scale

    has_own = False
    for key, tensor in pairs:
        has_own = has_own or is_kv_scale(key)
        yield key, tensor
    if not has_own:
        yield from scales.items()


def _write(pairs: Iterable[tuple[str, Tensor]], folder: Path, name: str) -> None:
    """Writes safetensors files of bounded size, and an index if there are several."""
    from safetensors.torch import save_file

    index: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    files: list[Path] = []

    def flush() -> None:
        files.append(folder / f"model-{len(files) + 1:05}.safetensors")
        save_file(waiting, files[-1], metadata={"format": "pt"})
        index.update(dict.fromkeys(waiting, files[-1].name))
        waiting.clear()

    num_bytes = 0
    for key, tensor in pairs:
        if key in index or key in waiting:
            raise InvalidRequestError.at(name, f"tensor {key!r} is given twice")
        # A copy, because tied tensors share memory, which safetensors files do not support.
        waiting[key] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes >= _FILE_BYTES:
            flush()
            num_bytes = 0
    if waiting:
        flush()
    if not files:
        raise InvalidRequestError.at(name, "there are no tensors")
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    (folder / f"model{_INDEX}").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class DrafterChange:
    """A requested change: add a drafter, remove one, or replace all.

    Args:
        drafter: section of a drafter that is added or replaces another; None: none.
        replaces: name of a drafter to remove; "": none.
        whole: a whole `speculative_config`, instead of both.
        make_room: whether old drafters end before new ones start, if there is no room for both.
            Until the new ones run, neither drafts.
        may_run_code: whether the change may import a user's drafter.
    """

    drafter: Mapping[str, Any] | None = None
    replaces: str = ""
    whole: Mapping[str, Any] | None = None
    make_room: bool = False
    may_run_code: bool = False

    def applied(self, current: SpeculationBase, names: Sequence[str]) -> dict[str, Any]:
        """Returns the resulting `speculative_config`, with the current verification settings.

        Args:
            names: names of the drafters, in the order of the sections of `current`.

        Raises:
            ConfigError: a key of vLLM's or SGLang's cannot be translated.
            InvalidRequestError: there is no drafter of that name, or nothing is requested.
        """
        rule = _given(current, SHARED_KEYS)
        if self.whole is not None:
            if self.drafter is not None or self.replaces:
                field_name = "drafter" if self.drafter is not None else "replaces"
                raise InvalidRequestError.at(
                    field_name, "speculative_config replaces all drafters; give it alone"
                )
            rule = {key: rule[key] for key in _RULE if key in rule}
            return rule | translate_section(self.whole)
        if self.drafter is None and not self.replaces:
            raise InvalidRequestError.at("drafter", "neither a drafter nor the name of one to go")
        sections = [each for each in current.sections if not isinstance(each, NoSpeculation)]
        members = [written_member(each) for each in sections]
        place = len(members)
        if self.replaces:
            if self.replaces not in names:
                known = ", ".join(map(repr, names)) or "none"
                raise InvalidRequestError.at(
                    "replaces",
                    f"no drafter {shown_value(self.replaces)} is served; there is {known}",
                )
            place = names.index(self.replaces)
            del members[place]
        if self.drafter is not None:
            members.insert(place, translate_section(self.drafter, "drafter."))
        return composed(current, members)

    @contextmanager
    def named(self, names: Sequence[str]) -> Iterator[None]:
        """Renames keys in errors about the new drafter to the user's keys, below `drafter`.

        Args:
            names: as in `applied`.
        """
        try:
            yield
        except ConfigError as error:
            if self.drafter is None:
                raise
            ours = [(r"^speculative_config\.", "drafter.")]
            if others := [name for name in names if name != self.replaces]:
                place = names.index(self.replaces) if self.replaces in names else len(others)
                keys = "|".join(map(re.escape, translate_section(self.drafter, "drafter.")))
                ours = [
                    (rf"^speculative_config\.members\.{place}\b", "drafter"),
                    (rf"^speculative_config\.({keys})\b", r"drafter.\1"),
                ]
            raise renamed(error, ours) from error.__cause__


def _given(section: SpeculationBase, keys: Sequence[str]) -> dict[str, Any]:
    """Returns those keys of a section that do not have their default."""
    return {key: getattr(section, key) for key in keys if not section.is_default(key)}


def written_member(section: SpeculationBase) -> dict[str, Any]:
    """Returns a drafter's section as a member of a composition, in plain values."""
    given = section.model_dump(mode="json", exclude_defaults=True, exclude=set(SHARED_KEYS))
    return {"decoding_type": getattr(section, "decoding_type"), **given}  # noqa: B009


def written(section: SpeculationBase) -> dict[str, Any]:
    """Returns a whole `speculative_config` in plain values, without defaults."""
    given = section.model_dump(mode="json", exclude_defaults=True)
    if isinstance(section, ComposeConfig):
        given["members"] = [written_member(each) for each in section.members]
    return {"decoding_type": getattr(section, "decoding_type"), **given}  # noqa: B009


def composed(current: SpeculationBase, given: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns a `speculative_config` of these members, with the shared settings of `current`."""
    rule, members = _given(current, SHARED_KEYS), list(given)
    if not members:
        return {**{key: rule[key] for key in _RULE if key in rule}, "decoding_type": "None"}
    if len(members) == 1:
        return rule | members[0]
    whole = {"decoding_type": "Compose", "members": members, **rule}
    if isinstance(current, ComposeConfig):
        whole |= _given(current, _OF_COMPOSITION)
    return whole
