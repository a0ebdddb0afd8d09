"""Other weights and drafters for a model that is served: what is asked for, and state dicts as
checkpoints.

The ranks load every change from a folder, through the code that loads them at the start, and so do
the ranks and engines that replace them. A state dict is therefore written to a folder first.
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
"""What becomes of running requests. abort: they end, with the finish reason "abort"; wait: they end
as they would have; keep: they go on afterwards. Waiting ones go on in the last two."""

SLEEP_TAGS = ("weights", "kv_cache")  # what can be woken, in the order in which it is needed

_OF_COMPOSITION = ("mode", "keep_order", "max_draft_len")
_RULE = tuple(key for key in SHARED_KEYS if key not in SpeculationBase.of_load)
_FILE_BYTES = 4 << 30  # of one file of a checkpoint
_KNOCK_S = 0.1  # between looks whether a trainer listens
_COPIED = ("*.json", "*.py", "*.jinja", "*.model", "*.txt")
_INDEX = ".safetensors.index.json"


def checked_mode(mode: Any) -> PauseMode:
    """`mode`, if it is one (raises `InvalidRequestError`)."""
    if mode not in get_args(PauseMode):
        allowed = ", ".join(map(repr, get_args(PauseMode)))
        raise InvalidRequestError.at("mode", f"expected one of {allowed}, got {mode!r}")
    found: PauseMode = mode
    return found


def checked_sleep(level: Any) -> int:
    """A level of sleep (raises `InvalidRequestError`)."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidRequestError.at("level", f"expected 1 or 2, got {shown_value(level)}")
    return level


def checked_tags(tags: Any) -> tuple[str, ...]:
    """What is to wake; None: all (raises `InvalidRequestError`)."""
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
    """What each engine is told, so that all join one group of a trainer's.

    Args:
        link: with the rank of the first engine's first rank.
        num_ranks: of each engine, in the order in which they join; 0: it cannot.

    Raises:
        InvalidRequestError, ConfigError: an argument is wrong.
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
    """Returns when somebody listens at a trainer's address.

    Raises:
        ConfigError: nobody did within the link's time, or it is no address.
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
    """Weights that a trainer sends; types are torch's, or their names."""
    kinds = tuple(str(each).removeprefix("torch.") for each in dtypes)
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return SentWeights(group, tuple(names), kinds, sizes, version=version)


@dataclass(slots=True)
class Change:
    """What the engine's thread does between two steps.

    Args:
        mode: of the requests that run then.
        perform: what is done once they do not run; raises `OutriderError` where it failed.
        done: called in the engine's thread, with why it failed, or None.
    """

    mode: PauseMode
    perform: Callable[[], None]
    done: Callable[[OutriderError | None], None]


@dataclass
class SavedStates:
    """State dicts as checkpoint folders, which are kept for as long as they are served.

    Folders are made where Python keeps temporary files (`TMPDIR`); ranks on other nodes have to see
    them there, too.
    """

    _kept: dict[str, Path] = field(default_factory=dict)  # by "model" and "drafter"

    def folder(
        self, weights: Weights, beside: str, name: str, scales: Mapping[str, Tensor] | None = None
    ) -> tuple[str, Path | None]:
        """The absolute folder of `weights`, and the same where it was made here.

        Args:
            beside: folder of the weights that they replace, whose configuration they have.
            name: of the argument.
            scales: of the KV cache, which stay where tensors come without.

        Raises:
            InvalidRequestError: `weights` are neither a path nor tensors by name.
            CheckpointError: the folder cannot be written, or no path is called so.
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
        """The weights of `name` are served; earlier ones are not needed any more."""
        self.drop(self._kept.pop(name, None))
        if made is not None:
            self._kept[name] = made

    def drop(self, made: Path | None) -> None:
        """Removes a folder that was made here."""
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)

    def close(self) -> None:
        """Nothing is served any more."""
        while self._kept:
            self.drop(self._kept.popitem()[1])


def kept_scales(config: EngineConfig, folder: str) -> Mapping[str, Tensor]:
    """Scales of the KV cache that the target in `folder` is served with, by tensors' names.

    Raises:
        CheckpointError: the folder is no checkpoint any more.
    """
    from ..workers.model.checkpoint.weights import Checkpoint

    if config.kv_cache_dtype == "auto":
        return {}
    return Checkpoint(Path(folder), **trust(config)).kv_scale_tensors()


def _pairs(weights: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a state dict in either form, one at a time."""
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
    """The pairs, and `scales` where they have none of their own."""
    from ..workers.model.checkpoint.weights import is_kv_scale

    has_own = False
    for key, tensor in pairs:
        has_own = has_own or is_kv_scale(key)
        yield key, tensor
    if not has_own:
        yield from scales.items()


def _write(pairs: Iterable[tuple[str, Tensor]], folder: Path, name: str) -> None:
    """Writes safetensors files of bounded size, and their index if there are several."""
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
        # A copy: tied tensors share their memory, which files cannot.
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
    """What is asked for: another drafter, one less, or all others.

    Args:
        drafter: section of a drafter that is added, or takes the place of one; None: none.
        replaces: name of a drafter that goes; "": none.
        whole: in place of both, the whole `speculative_config`.
        make_room: the drafters that go end before those that come are started, where there is no
            room for both; nothing is drafted by them meanwhile.
        may_run_code: whether a drafter of the user's own may come, whose code is imported.
    """

    drafter: Mapping[str, Any] | None = None
    replaces: str = ""
    whole: Mapping[str, Any] | None = None
    make_room: bool = False
    may_run_code: bool = False

    def applied(self, current: SpeculationBase, names: Sequence[str]) -> dict[str, Any]:
        """The `speculative_config` afterwards, with the verification of the current one.

        Args:
            names: of the drafters, in the order of the sections of `current`.

        Raises:
            ConfigError: a key of vLLM's or SGLang's cannot be translated.
            InvalidRequestError: there is no drafter of that name, or nothing is asked for.
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
        """Errors about the drafter that comes name its keys below `drafter`, where they were given.

        Args:
            names: as of `applied`.
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
    """The keys of a section that do not have their defaults."""
    return {key: getattr(section, key) for key in keys if not section.is_default(key)}


def written_member(section: SpeculationBase) -> dict[str, Any]:
    """A drafter's section as a member has it, in plain values."""
    given = section.model_dump(mode="json", exclude_defaults=True, exclude=set(SHARED_KEYS))
    return {"decoding_type": getattr(section, "decoding_type"), **given}  # noqa: B009


def written(section: SpeculationBase) -> dict[str, Any]:
    """A whole `speculative_config` in plain values, without defaults."""
    given = section.model_dump(mode="json", exclude_defaults=True)
    if isinstance(section, ComposeConfig):
        given["members"] = [written_member(each) for each in section.members]
    return {"decoding_type": getattr(section, "decoding_type"), **given}  # noqa: B009


def composed(current: SpeculationBase, given: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A `speculative_config` of these members, with what `current` says of all together."""
    rule, members = _given(current, SHARED_KEYS), list(given)
    if not members:
        return {**{key: rule[key] for key in _RULE if key in rule}, "decoding_type": "None"}
    if len(members) == 1:
        return rule | members[0]
    whole = {"decoding_type": "Compose", "members": members, **rule}
    if isinstance(current, ComposeConfig):
        whole |= _given(current, _OF_COMPOSITION)
    return whole
