"""Methods of `LLM` that change a running model: weights, drafters, pauses, memory."""

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
    """Mixin with these methods. Running requests need not end for any of them."""

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
        """Serves other weights of the same models from the next step on.

        Afterwards, outputs are those of a new engine with these weights. Tokenizer, dtype and
        configuration stay the same, and so do the texts that drafters have stored; cached prefixes
        are dropped. Ranks that are restarted load these weights, so a folder must exist until the
        next update.

        Args:
            weights: the folder of a checkpoint, a state dict, or pairs of name and tensor, with all
                names of the checkpoint that is served. None: unchanged.
            drafter: weights of the only drafter that has weights, in the same forms. None:
                unchanged.
            mode: for running requests. "keep": they continue, and the KV of their tokens is
                recomputed with the new weights; "wait": they end first; "abort": they end at once.
            weight_version: name of the weights in outputs; "": the number of updates.

        Returns:
            The number of updates, including this one.

        Raises:
            InvalidRequestError: an argument is invalid.
            CheckpointError, ConfigError: a tensor is missing, unknown or has another shape, a file
                is incomplete, it is another model, or there is no such drafter. The message names
                the argument or tensor, and nothing has changed.
            WorkerError: a rank failed to load them; the previous weights are still served.
            EngineDeadError: the engine is down.
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
        """Returns `drafters` (names and states) and the `speculative_config` of them all."""
        return self.engine.drafters()

    def load_drafter(
        self, drafter: dict[str, Any], *, replaces: str = "", make_room: bool = False
    ) -> list[str]:
        """Adds a drafter or replaces one, from some later step on.

        Requests continue, and outputs do not change, because drafts are verified as before. Other
        drafters are not affected. A look-up, or a drafter with its own workers, is started while
        the engine continues to draft as before. A drafter in the target's ranks shares their
        caches: cached prefixes are dropped, and the KV of running requests is recomputed.

        Args:
            drafter: its section, as in `speculative_config`.
            replaces: name of the drafter to remove; "": none.
            make_room: whether that drafter ends first, if there is no room for both.

        Returns:
            The names of the drafters.

        Raises:
            InvalidRequestError: there is no drafter of that name.
            ConfigError, CheckpointError, ResourcesError: it cannot draft for the target. The
                message names the key, and nothing has changed.
            WorkerError: a rank failed to load it; the previous drafters are still in use.
            EngineDeadError: the engine is down.
        """
        change = DrafterChange(drafter, replaces, None, make_room, may_run_code=True)
        return self._change_drafters(change)

    def unload_drafter(self, name: str) -> list[str]:
        """Removes the drafter of that name; returns and raises as `load_drafter`."""
        return self._change_drafters(DrafterChange(replaces=name))

    def replace_drafters(
        self, speculative_config: dict[str, Any] | None, *, make_room: bool = False
    ) -> list[str]:
        """Replaces the `speculative_config`; None: plain decoding. Results as for `load_drafter`.

        The verification rule does not change if the section names none.
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
        """Trains the head on recent texts now; returns once it serves or is dropped.

        Requires `online_adaptation`. Requests continue meanwhile, and outputs do not change.

        Args:
            timeout_s: time after which this returns although the round is still running.

        Returns:
            The round, as in `stats()["online_adaptation"]["rounds"]`: its `outcome` ("trial" and
            "swapped": the adapted head serves; "kept": the former head is as good; "failed" and
            "cancelled": see `reason`), and accepted tokens per draft on held-out texts.

        Raises:
            InvalidRequestError: adaptation is off or paused, or there is nothing to train on yet.
            EngineDeadError: the engine is down.
        """
        return self.engine.adapt("run", timeout_s)["rounds"][-1]

    def pause_adaptation(self) -> None:
        """Stops training until `resume_adaptation`; cancels the current round."""
        self.engine.adapt("pause")

    def resume_adaptation(self) -> None:
        """Resumes training after `pause_adaptation`."""
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
        """Makes the ranks join a `TrainerGroup` that the trainer's rank 0 creates at the same time.

        Args:
            master_address, master_port: address on which the trainer's rank 0 listens.
            rank_offset: rank of this engine's first rank in the group.
            world_size: size of the group, including the trainer.
            timeout_s: for joining, and later for every tensor.

        Raises:
            InvalidRequestError, ConfigError: an argument is invalid, or not all ranks joined in
                time.
            EngineDeadError: the engine is down.
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
        """Serves target weights that the trainer sends now, in this order, without files.

        The names must be all names of the checkpoint that is served. Tensors are sent whole, and
        every rank keeps its part. The previous weights are served until all tensors have arrived.
        Ranks that are restarted do not have the sent weights; the engine is then paused and reports
        that.

        Args:
            dtypes: torch dtypes or their names; weights are converted to the dtype of the start.
            weight_version: as in `update_weights`.

        Returns:
            The number of updates, including this one.

        Raises:
            ConfigError: a tensor is missing, unknown or has another shape, the group was not
                joined, or the trainer did not send in time; nothing has changed.
            WorkerError: a rank failed; all ranks were restarted with the weights of the last
                folder.
            EngineDeadError: the engine is down.
        """
        sent = sent_weights(group_name, names, dtypes, shapes, weight_version)
        return self.engine.take_weights(sent, checked_mode(mode))

    def destroy_weights_update_group(self, group_name: str = "weights") -> None:
        """Makes the ranks leave the trainer's group; raises `ConfigError` if there is none."""
        self.engine.link_trainer(TrainerLink(group_name))

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Adds a LoRA adapter, from some later step on; running requests continue.

        Raises:
            InvalidRequestError: the name is already used, or empty.
            ConfigError: the engine was started without `enable_lora` or `lora_modules`.
            CheckpointError: the folder does not hold an adapter of the target; nothing has changed.
            EngineDeadError: the engine is down.
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
        """Removes a LoRA adapter; returns once its requests have ended.

        Raises:
            InvalidRequestError: it is not served.
            EngineDeadError: the engine is down.
        """
        with self._adding:
            if lora_name not in self.frontend.adapters:
                raise InvalidRequestError.at("lora_name", f"no adapter {lora_name!r} is served")
            del self.frontend.adapters[lora_name]
            self.engine.remove_adapter(lora_name)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stops computing until `resume_generation`; returns once nothing is computed.

        Args:
            mode: for running requests. "abort": they end; "wait": they end normally, and this
                returns afterwards; "keep": they continue after the pause. Requests that wait or
                arrive meanwhile stay queued.
        """
        self.engine.pause(checked_mode(mode))

    def resume_generation(self) -> None:
        """Continues after `pause_generation`."""
        self.engine.resume()

    def is_paused(self) -> bool:
        """Returns True if requests wait for `resume_generation`."""
        return self.engine.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Frees the memory of the target and its drafters until `wake_up`.

        The KV cache and cached prefixes are dropped, and weights leave the device. Requests that
        arrive meanwhile wait. On a GPU, level 1 keeps the target's weights in host memory. On a CPU
        they are freed, and later read from their folder again. Drafters with their own workers end,
        and are started again.

        Args:
            level: 1: the same weights return; 2: they are dropped, because `update_weights`
                follows.
            mode: for running requests, as in `pause_generation`.

        Raises:
            InvalidRequestError: an argument is invalid.
            WorkerError: a rank failed; all ranks were restarted and are awake.
            EngineDeadError: the engine is down.
        """
        self.engine.sleep(checked_sleep(level), checked_mode(mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the memory again, and continues once all of it is allocated.

        Args:
            tags: "weights" alone, so that `update_weights` has room for other weights before the
                cache is allocated; "kv_cache", which includes the weights if they are missing;
                None: both.

        Raises:
            InvalidRequestError: a tag is unknown.
            EngineDeadError: the engine is down.
        """
        self.engine.wake_up(checked_tags(tags))

    def is_sleeping(self) -> bool:
        """Returns True if requests wait for `wake_up`."""
        return self.engine.is_sleeping
