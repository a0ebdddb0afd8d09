"""`LLM`'s methods that change a model which serves: weights, drafters, pauses, memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequestError
from ..workers.spec import TrainerLink
from .frontend import Frontend
from .preflight import added_adapter
from .weights import (
    DrafterChange,
    PauseMode,
    SavedStates,
    checked_link,
    checked_mode,
    checked_sleep,
    checked_tags,
    kept_scales,
    sent_weights,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .weights import Weights


class Upkeep:
    """The methods; none needs the requests to end."""

    config: EngineConfig
    frontend: Frontend
    _states: SavedStates
    _adding: threading.Lock  # held while adapters are changed

    @property
    def engine(self) -> Engine:
        """The running engine."""
        raise NotImplementedError

    def update_weights(
        self,
        weights: Weights | None = None,
        *,
        drafter: Weights | None = None,
        mode: PauseMode = "keep",
        weight_version: str = "",
    ) -> int:
        """Serves other weights of the same models, from the next step on.

        Afterwards outputs are those of a new engine with these weights. Tokenizer, dtype and
        configuration stay, and so does what drafters have stored of texts; stored prefixes are
        dropped. The ranks that replace others load these weights, so a folder has to stay until
        the next update.

        Args:
            weights: folder of a checkpoint, or a state dict, or pairs of name and tensor, under the
                names of the checkpoint that is served: all of them. None: as before.
            drafter: alike, of the one drafter that has weights.
            mode: of running requests. "keep": they go on, and their tokens so far are computed
                again with the new weights; "wait": they end first; "abort": they end at once.
            weight_version: by which outputs name the weights; "": the number of updates.

        Returns:
            How many updates there were, with this one.

        Raises:
            InvalidRequestError: an argument is wrong.
            CheckpointError, ConfigError: a tensor is missing, unknown or of another shape, a file
                is cut short, it is another model, or there is no such drafter; names it, and
                nothing has changed.
            WorkerError: a rank failed as it loaded them; what was served before still is.
            EngineDeadError: the engine is gone.
        """
        checked_mode(mode)
        if weights is None and drafter is None:
            raise InvalidRequestError.at("weights", "neither weights nor those of a drafter")
        if weights is None and weight_version:
            raise InvalidRequestError.at(
                "weight_version", "it names the target's weights, which stay as they are"
            )
        served = self.engine.weights()
        made: dict[str, Path | None] = {}
        paths = {"weights": "", "drafter": ""}
        try:
            for name, given in (("weights", weights), ("drafter", drafter)):
                if given is not None:
                    beside = served["model" if name == "weights" else "drafter"]
                    if beside is None:
                        raise ConfigError.at(
                            name,
                            "it replaces the weights of the one drafter that has some; here there "
                            "is none, or there are several",
                        )
                    scales = kept_scales(self.config, beside) if name == "weights" else None
                    paths[name], made[name] = self._states.folder(given, beside, name, scales)
            count = self.engine.update_weights(
                paths["weights"], paths["drafter"], mode, weight_version
            )
        except BaseException:
            for folder in made.values():
                self._states.drop(folder)
            raise
        for name, folder in made.items():
            self._states.keep(name, folder)
        return count

    def drafters(self) -> dict[str, Any]:
        """`drafters`, by name and with their state, and the `speculative_config` of them all."""
        return self.engine.drafters()

    def load_drafter(
        self, drafter: dict[str, Any], *, replaces: str = "", make_room: bool = False
    ) -> list[str]:
        """Drafts with one more drafter, or with another in the place of one, from some step on.

        Requests go on, and no output changes: what is drafted is verified as before. Drafters that
        stay are not touched. One with workers of its own, and any look-up, is started beside the
        engine, which drafts as before until it is up. One in the target's ranks shares their
        caches: stored prefixes are dropped, and tokens so far are computed again.

        Args:
            drafter: its section, as in `speculative_config`.
            replaces: name of the drafter that goes; "": none.
            make_room: that one ends first, where there is no room for both.

        Returns:
            The names of the drafters.

        Raises:
            InvalidRequestError: there is no drafter of that name.
            ConfigError, CheckpointError, ResourcesError: it cannot draft for the target; names what
                is wrong, and nothing has changed.
            WorkerError: a rank failed as it loaded; drafters are those from before.
            EngineDeadError: the engine is gone.
        """
        change = DrafterChange(drafter, replaces, None, make_room, may_run_code=True)
        return self._change_drafters(change)

    def unload_drafter(self, name: str) -> list[str]:
        """Drafts without the drafter of that name (returns and raises as `load_drafter`)."""
        return self._change_drafters(DrafterChange(replaces=name))

    def replace_drafters(
        self, speculative_config: dict[str, Any] | None, *, make_room: bool = False
    ) -> list[str]:
        """Drafts by another `speculative_config`; None: plainly (else as `load_drafter`).

        The verification rule stays: a section that names none has the engine's.
        """
        whole = {"decoding_type": "None"} if speculative_config is None else speculative_config
        change = DrafterChange(whole=whole, make_room=make_room, may_run_code=True)
        return self._change_drafters(change)

    def _change_drafters(self, change: DrafterChange) -> list[str]:
        engine = self.engine
        engine.change_drafters(change)
        self.frontend.drafters = engine.info.drafters
        return list(engine.info.drafters)

    def adapt(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Trains the head on recent texts now, and returns once it serves or is dropped.

        Needs `online_adaptation`. Requests go on meanwhile, and no output changes.

        Args:
            timeout_s: after which this returns all the same; the round goes on.

        Returns:
            The round, as in `stats()["online_adaptation"]["rounds"]`: `outcome` ("trial" and
            "swapped": the adapted head serves; "kept": the former is as good; "failed",
            "cancelled": with a `reason`), and accepted tokens of a draft on held-out texts.

        Raises:
            InvalidRequestError: it is off, paused, or there is nothing to learn from yet.
            EngineDeadError: the engine is gone.
        """
        return self.engine.adapt("run", timeout_s)["rounds"][-1]

    def pause_adaptation(self) -> None:
        """Trains no head until `resume_adaptation`; a round under way is cancelled."""
        self.engine.adapt("pause")

    def resume_adaptation(self) -> None:
        """Goes on after `pause_adaptation`."""
        self.engine.adapt("resume")

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weights",
        backend: Literal["gloo", "nccl"] = "gloo",
        *,
        timeout_s: float = 300.0,
    ) -> None:
        """Has the ranks join a trainer's `TrainerGroup`, which its rank 0 makes at the same time.

        Args:
            master_address, master_port: where the trainer's rank 0 listens.
            rank_offset: rank of this engine's first rank in the group.
            world_size: of the group, the trainer included.
            timeout_s: for joining, and of every tensor later.

        Raises:
            InvalidRequestError, ConfigError: an argument is wrong, or not all have joined in time.
            EngineDeadError: the engine is gone.
        """
        (link,) = checked_link(
            TrainerLink(
                group_name, master_address, master_port, rank_offset, world_size, backend, timeout_s
            ),
            [self.engine.num_sent_ranks()],
        )
        self.engine.link_trainer(link)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weights",
        *,
        mode: PauseMode = "keep",
        weight_version: str = "",
    ) -> int:
        """Serves weights of the target that the trainer sends now, in this order, without files.

        Names are those of the checkpoint that is served, all of them; whole tensors, of which every
        rank keeps its part. Until all have arrived, what was served before still is. Ranks that
        replace others do not have them: the engine is paused then, and says so.

        Args:
            dtypes: torch's types, or their names; served is the type of the start.
            weight_version: as of `update_weights`.

        Returns:
            How many updates there were, with this one.

        Raises:
            ConfigError: a tensor is missing, unknown, or of another shape, or the group was not
                joined, or the trainer did not send in time; nothing has changed.
            WorkerError: a rank failed; all were replaced, with the weights of the last folder.
            EngineDeadError: the engine is gone.
        """
        sent = sent_weights(group_name, names, dtypes, shapes, weight_version)
        return self.engine.take_weights(sent, checked_mode(mode))

    def destroy_weights_update_group(self, group_name: str = "weights") -> None:
        """Has the ranks leave the trainer's group (raises `ConfigError` where there is none)."""
        self.engine.link_trainer(TrainerLink(group_name))

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Serves another LoRA adapter from some step on; requests that run go on.

        Raises:
            InvalidRequestError: the name is taken, or empty.
            ConfigError: the engine was started without `enable_lora` or `lora_modules`.
            CheckpointError: the folder is no adapter of the target; nothing has changed.
            EngineDeadError: the engine is gone.
        """
        with self._adding:
            if not lora_name or lora_name in (self.config.model_name, *self.frontend.adapters):
                raise InvalidRequestError.at("lora_name", f"{lora_name!r} is taken, or empty")
            self._add_adapter(lora_name, lora_path)

    def _add_adapter(self, name: str, path: str) -> None:
        path = added_adapter(self.config, name, path)
        self.engine.add_adapter(name, path)
        self.frontend.adapters[name] = path

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Serves a LoRA adapter no more; returns once its requests have ended.

        Raises:
            InvalidRequestError: it is not served.
            EngineDeadError: the engine is gone.
        """
        with self._adding:
            if lora_name not in self.frontend.adapters:
                raise InvalidRequestError.at("lora_name", f"no adapter {lora_name!r} is served")
            del self.frontend.adapters[lora_name]
            self.engine.remove_adapter(lora_name)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Computes nothing until `resume_generation`; returns once that is so.

        Args:
            mode: of running requests. "abort": they end; "wait": they end as they would have, and
                only then this returns; "keep": they go on afterwards. Requests that wait, or
                arrive meanwhile, go on waiting.
        """
        self.engine.pause(checked_mode(mode))

    def resume_generation(self) -> None:
        """Goes on after `pause_generation`."""
        self.engine.resume()

    def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self.engine.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Gives the memory of the target and its drafters back, until `wake_up`.

        The KV cache goes, and with it stored prefixes; weights leave the device. Requests that
        arrive meanwhile wait. On a GPU, level 1 keeps the target's weights in host memory; on a
        CPU they are freed, and read from their folder again. Drafters in workers of their own end,
        and start again.

        Args:
            level: 1: the same weights come back; 2: they are dropped, as `update_weights` follows.
            mode: of running requests, as of `pause_generation`.

        Raises:
            InvalidRequestError: an argument is wrong.
            WorkerError: a rank failed; all were replaced, and are awake.
            EngineDeadError: the engine is gone.
        """
        self.engine.sleep(checked_sleep(level), checked_mode(mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again, and goes on once it has all.

        Args:
            tags: "weights" alone, so that `update_weights` has room for others before the cache
                takes it; "kv_cache", with the weights where they are not there; None: both.

        Raises:
            InvalidRequestError: a tag is unknown.
            EngineDeadError: the engine is gone.
        """
        self.engine.wake_up(checked_tags(tags))

    def is_sleeping(self) -> bool:
        """Whether requests wait for `wake_up`."""
        return self.engine.is_sleeping
