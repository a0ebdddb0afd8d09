"""One rank: its device, its models, and the handler of the step channel's messages.

It runs in a Ray actor (`cluster/`), in a thread (`workers/group.py`), or in a test.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..config import HeadConfig
from ..drafters.heads.protocol import TargetFacts
from ..drafters.protocol import Drafted, DraftStep, HeadAnswer, HeadAsk
from ..drafters.registry import captured_layers, check_head
from ..errors import CheckpointError, ConfigError, OutriderError, shown_value
from ..scheduler.types import StepPlan, Verdict
from .attention import KV_FORMATS
from .collective import Agreement, Collective, TrainerGroup, gpu_of
from .device_step.chains import ChainSizes, chain_bytes, chain_obstacle
from .device_step.draft import head_obstacle
from .device_step.seats import SeatSizes, reserved_bytes
from .device_step.service import obstacle
from .devices import dtype_of
from .draft import DraftService, SharedDrafts
from .head import HeadService
from .model.checkpoint.adapters import FIELD, open_adapters, placed
from .model.checkpoint.pooling import Pooler, Pooling, read_pooling
from .model.checkpoint.progress import Progress
from .model.checkpoint.weights import Checkpoint, Received
from .model.fit import (
    ServedModel,
    Serving,
    check_adapters,
    check_blocks,
    check_weights,
    received_problem,
    room_of,
)
from .model.info import ModelInfo
from .model.paged import Offloaded, PagedModel, known_choice, trim
from .model.stages import Stage
from .model.target import load_model
from .remote_head import RemoteHeadWorker
from .spec import (
    DeviceStepReport,
    Leased,
    ModelReport,
    ModelSpec,
    NewAdapter,
    NewDrafters,
    NewWeights,
    RankLocation,
    Rest,
    SentWeights,
    TakeSent,
    TrainerLink,
    WeightsAnswer,
    WorkerReport,
    WorkerSpec,
    on_this_node,
)
from .target import TargetService
from .threads import Threads
from .transport.channel import LinkOffer, ListenFeatures, OpenFeatures, PendingReply
from .transport.features import VerdictEnd
from .verify import make_rule

log = logging.getLogger(__name__)

Change = NewWeights | NewAdapter | NewDrafters | Rest | TrainerLink | SentWeights | TakeSent
Message = StepPlan | DraftStep | Leased | HeadAsk | ListenFeatures | OpenFeatures | Change
Reply = Verdict | Drafted | HeadAnswer | LinkOffer | WeightsAnswer | WorkerReport | None


class Worker:
    """Loads models, then allocates: the number of KV blocks is the minimum over all ranks.

    Args:
        node, host: name and address of the node that it runs on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        collective: Collective,
        device: torch.device,
        node: str = "",
        host: str = "127.0.0.1",
    ) -> None:
        self._spec = spec
        self._group = self._collective = collective  # all ranks; ranks that share every layer
        self._stage: Stage | None = None  # None: the only one
        self._pooling: Pooling | str | None = None  # None: not read yet
        self._device = device
        self._node, self._host = node, host
        self._models: dict[str, PagedModel] = {}
        self._served: dict[str, ServedModel] = {}
        self._infos: dict[str, ModelInfo] = {}
        self._trainers: dict[str, TrainerGroup] = {}  # joined, by name
        self._is_sent = False  # the target's weights came from a trainer and are in no folder
        self._sent_id = ""  # id of these weights if they were staged
        self._staged: tuple[str, dict[str, torch.Tensor]] = ("", {})  # id and tensors
        self._report: WorkerReport | None = None  # result of `load`
        self._num_blocks = (0, 0)  # of the target and the draft model; set by `allocate`
        self._target: TargetService | None = None
        self._draft: DraftService | None = None
        self._shared: SharedDrafts | None = None
        self.beside: VerdictEnd | None = None  # reads verdicts for a draft model on a single rank
        if spec.draft and not spec.target and collective.size == 1 and not spec.num_leases:
            self.beside = VerdictEnd(host, self._awaits, self._go_on)
        self._head: HeadService | None = None
        self._remote_head: RemoteHeadWorker | None = None
        self._asleep: set[str] = set()  # what was freed: "weights", "kv_cache"
        self._offloaded: Offloaded | None = None  # weights in host memory
        self._is_frozen = False
        self.progress = Progress()  # of loading weights
        self._step_obstacle = ""  # why steps are planned on the host; set once models are loaded
        self._fed_layers: tuple[int, ...] = ()  # layers whose inputs separate heads read
        self._threads, self._draft_threads = (
            Threads(spec.threads, spec.size, on_cpu=device.type == "cpu") for _ in range(2)
        )
        self._handlers: dict[type, Callable[[Any], Reply | PendingReply]] = {
            StepPlan: self._verify,
            DraftStep: self._draft_step,
            Leased: self._leased,
            HeadAsk: self._handle_head,
            ListenFeatures: self._handle_head,
            OpenFeatures: self._handle_head,
            NewWeights: self._update,
            NewAdapter: self._add_adapter,
            NewDrafters: self._change_drafters,
            Rest: self._rest,
            TrainerLink: self._link_trainer,
            SentWeights: self._receive,
            TakeSent: self._take_sent,
        }

    def load(self, known: WorkerReport | None = None) -> WorkerReport:
        """Loads this rank's shards and reports how many KV blocks fit.

        Args:
            known: report of the replaced rank, which determines the forward.
        """
        if self._spec.stages > 1 and self._stage is None:
            self._collective, self._stage = Stage.join(self._group, self._spec.stages)
        self._load_models(known)
        self._load_heads()
        # Both caches share the memory left by the weights and hold the same number of tokens.
        per_token = sum(model.kv_bytes_per_token() for model in self._models.values())
        if self._head is not None:
            per_token += self._head.kv_bytes_per_token()
        self._step_obstacle = self._find_step_obstacle()
        log.info("device step: %s", f"off: {self._step_obstacle}" if self._step_obstacle else "on")
        if "draft" in self._models:
            reason = self._chain_obstacle()
            log.info("device step of the draft model: %s", f"off: {reason}" if reason else "on")
        reports = {
            name: self._report_of(name, spec, per_token)
            for name, spec in self._model_specs().items()
        }
        head = self._head or self._remote_head
        self._report = WorkerReport(
            rank=self._group.rank,
            device=str(self._device),
            target=reports.get("target"),
            draft=reports.get("draft"),
            location=RankLocation(self._node, os.getpid(), gpu_of(self._device)),
            all_reduce=self._collective.all_reduce_by,
            head=head.report() if head is not None else None,
        )
        return self._report

    def renew(self) -> None:
        """Drops all requests and wakes up; as after `load`, `allocate` must be called next."""
        self._release()
        self._take_weights()
        self._load_heads()
        self._asleep.clear()

    def _link_trainer(self, message: TrainerLink) -> WeightsAnswer:
        """Joins a trainer's group, or leaves it; the answer has the reason of a failure."""
        old = self._trainers.pop(message.name, None)
        if old is not None:
            old.close()
        if not message.host:
            known = "" if old is not None else f"there is no group {shown_value(message.name)}"
            return WeightsAnswer(known, "group_name" if known else "")
        reason = ""
        try:
            self._trainers[message.name] = TrainerGroup(
                message.host,
                message.port,
                message.world_size,
                name=message.name,
                backend="nccl" if message.backend == "nccl" else "gloo",
                rank=message.rank_offset + self._collective.rank,
                timeout_s=message.timeout_s,
                device=self._device if message.backend == "nccl" else None,
            )
        except (RuntimeError, ValueError, OutriderError) as error:  # torch's, ours
            reason = f"no process group with the trainer: {' '.join(str(error).split())[:300]}"
        answer = self._agreed("master_address", reason)
        if answer.problem:
            self._trainers.pop(message.name, None)
        return answer

    def _receive(self, message: SentWeights) -> WeightsAnswer:
        """Takes or stages weights that a trainer sends; nothing changes until all have arrived."""
        assert self._report is not None, "there is a target"
        spec = self._spec.target
        assert spec is not None, "there is a target"
        field, reason = "group_name", f"no group {shown_value(message.group)} was joined"
        if message.group in self._trainers:
            field, reason = received_problem(message, spec, self._spec.size)
        answer = self._agreed(field or "names", reason)
        if answer.problem or message.until == "check":
            return answer
        self._staged = ("", {})
        received: dict[str, torch.Tensor] = {}
        field = "group_name"
        try:
            dtypes = [getattr(torch, dtype) for dtype in message.dtypes]
            tensors = self._trainers[message.group].receive(dtypes, message.shapes)
            received.update(zip(message.names, tensors, strict=True))
            if spec.kv_dtype in KV_FORMATS:
                Received(spec.folder, received, **spec.trust).kv_scales()
        except RuntimeError as error:  # raised by torch: the trainer is gone, or too late
            reason = f"the weights did not arrive: {' '.join(str(error).split())[:300]}"
        except CheckpointError as error:
            field, reason = "names", error.message
        answer = self._agreed(field, reason)
        if answer.problem:
            return answer
        if message.until == "stage":
            self._staged = (message.id, received)
        else:
            self._serve_received(received, message.id)
        return WeightsAnswer()

    def _take_sent(self, message: TakeSent) -> WeightsAnswer:
        staged_id, received = self._staged
        self._staged = ("", {})
        if not message.id:
            return WeightsAnswer()
        is_served = self._is_sent and self._sent_id == message.id
        has_them = is_served or staged_id == message.id
        reason = "" if has_them else "weights that a trainer has sent are not there"
        answer = self._agreed("weights", reason)
        if not answer.problem and not is_served:
            self._serve_received(received, message.id)
        return answer

    def _serve_received(self, received: dict[str, torch.Tensor], sent_id: str) -> None:
        self._offloaded = None
        self._models.pop("target", None)
        self._serve_anew(received)
        self._is_sent, self._sent_id = True, sent_id

    def _agreed(self, field: str, reason: str) -> WeightsAnswer:
        """Returns the answer of all ranks, a refusal if any rank has a `reason`; collective."""
        agreed = Agreement(self._group, self._device).problem(reason)
        return WeightsAnswer(agreed, field if agreed else "")

    def _rest(self, message: Rest) -> None:
        """Frees memory, or allocates it again."""
        with self._unfrozen():
            if message.level:
                self._sleep(message.level)
                return
            if "weights" in self._asleep:
                self._take_weights()
                self._load_heads()
                self._asleep.discard("weights")
            if "kv_cache" in message.tags and "kv_cache" in self._asleep:
                self.allocate(*self._num_blocks)
                self._asleep.clear()

    def _sleep(self, level: int) -> None:
        on_gpu = self._device.type == "cuda"
        if level == 1 and on_gpu and "weights" not in self._asleep:
            self._offloaded = Offloaded(self._models)
        elif level > 1 or not on_gpu:
            keeps = level == 1 and self._is_sent
            self._models, self._offloaded = self._models if keeps else {}, None
            self._is_sent = keeps
        self._asleep = {"weights", "kv_cache"}
        self._release()
        trim()

    def _serve_anew(self, received: dict[str, torch.Tensor] | None = None) -> None:
        """Loads missing weights and creates caches, except for what is asleep.

        Args:
            received: the target's weights from a trainer; emptied while they are loaded.
        """
        with self._unfrozen():
            self._release()
            self._take_weights(received)
            if received is not None:
                received.clear()
            self._load_heads()
            self._asleep.discard("weights")
            if not self._asleep:
                self.allocate(*self._num_blocks)

    def _take_weights(self, received: Mapping[str, torch.Tensor] | None = None) -> None:
        """Restores weights that were given away, from host memory or from their folders.

        Args:
            received: the target's weights from a trainer.
        """
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.restore()
        self._load_models(self._report, received)

    def freeze(self) -> None:
        """Exempts all living objects from garbage collection: modules and weights live on."""
        gc.collect()
        gc.freeze()
        self._is_frozen = True

    @contextmanager
    def _unfrozen(self) -> Iterator[None]:
        """Unfreezes objects in this context, so that dropped ones are collected."""
        if self._is_frozen:
            gc.unfreeze()  # modules have reference cycles
        yield
        if self._is_frozen:
            self.freeze()

    def _release(self) -> None:
        """Frees caches and heads before their replacements are created."""
        self.close_links()
        self._target = self._draft = self._head = self._remote_head = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _model_specs(self) -> dict[str, ModelSpec]:
        specs = {"target": self._spec.target, "draft": self._spec.draft}
        if self._stage is not None and not self._stage.is_last:
            del specs["draft"]  # only the last stage drafts
        return {name: spec for name, spec in specs.items() if spec is not None}

    def _load_models(
        self, known: WorkerReport | None, received: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Loads the models that are not loaded yet; `known` as in `load`."""
        for name, spec in self._model_specs().items():
            if name in self._models:
                continue
            sent = received if name == "target" else None
            dtype = dtype_of(spec.dtype)
            if sent is not None:  # keep the dtype that is served, whatever the trainer sends
                dtype = self._infos[name].dtype
            folder, form = spec.fetch(self.progress), KV_FORMATS.get(spec.kv_dtype)
            self._models[name] = load_model(
                folder,
                dtype=dtype,
                received=sent,
                device=self._device,
                collective=self._collective,
                forward=spec.forward,
                deterministic=spec.deterministic,
                prompt_attention=spec.prompt_attention,
                keeps_quantised=spec.keeps_quantised,
                whole_experts=spec.whole_experts,
                known=known_choice(getattr(known, name, None)),
                adapters=placed(spec.adapters),
                stage=self._stage if name == "target" else None,
                max_model_len=spec.max_model_len,
                progress=self.progress,
                **spec.trust,
            )
            if form is not None:
                stage, count = self._stage, self._models[name].info.num_layers
                first = 0 if stage is None else stage.layers(count).start
                scales = Checkpoint(folder, **spec.trust)
                if sent is not None:
                    scales = Received(folder, sent, **spec.trust)
                self._models[name].keep_kv_as(form, scales, first)
            if name == "draft" and self._models[name].keeps_states:
                raise ConfigError.at(
                    "speculative_config.speculative_model",
                    "a draft model has no recurrent layers: only a target's steps rewind states",
                )
            self._infos[name] = self._models[name].info
            if name not in self._served:
                trusted = spec.trust_remote_code
                self._served[name] = ServedModel.of(folder, trust_remote_code=trusted)

    def _update(self, weights: NewWeights) -> WeightsAnswer:
        """Checks other weights, or loads them as `load` does; requests must then be sent again.

        The caches keep their number of blocks. After a failure during loading, the worker serves
        nothing.
        """
        if weights.only_checks:
            field, reason = self._weights_problem(weights)
            return self._agreed(field or "weights", reason)
        assert self._report is not None, "weights are replaced where there are some"
        if weights.target:
            self._is_sent = False
        if self._offloaded is not None:  # replaced weights need not be restored first
            self._models, self._offloaded = {}, None
        for name in ("target", "draft"):
            if getattr(weights, name):
                self._models.pop(name, None)
        self._spec = weights.applied(self._spec, self._report)
        self._serve_anew()
        return WeightsAnswer()

    def _add_adapter(self, adapter: NewAdapter) -> WeightsAnswer:
        """Checks another adapter of the target, or serves it from the next step on."""
        spec, held = self._spec.target, self._models["target"].adapters
        assert spec is not None, "there is a target"
        if adapter.only_checks:
            reason = ""
            try:
                (opened,) = open_adapters(placed([(adapter.name, adapter.path)]) or ())
                folder, size = spec.folder, self._collective.size
                check_adapters(folder, size, [opened], Serving(), **spec.trust)
            except ConfigError as error:
                reason = error.message
            return self._agreed(FIELD, reason)
        assert held is not None, "it takes adapters"
        if not adapter.path:
            held.remove(adapter.name)
        else:
            (opened,) = open_adapters(placed([(adapter.name, adapter.path)]) or ())
            held.add(opened)
        self._spec = adapter.applied(self._spec)
        return WeightsAnswer()

    def _change_drafters(self, news: NewDrafters) -> WeightsAnswer | WorkerReport:
        """Replaces the drafters in this rank; loads the new ones before it drops the old ones.

        Requests must be sent again. The target's cache keeps its number of blocks; a draft model
        gets as many unless its section sets another number.
        """
        assert self._report is not None, "there is a target"
        spec = news.applied(self._spec)
        old = self._spec, self._models.get("draft"), self._served.get("draft"), self._head
        field = reason = ""
        try:
            if news.only_checks:
                field, reason = self._drafters_problem(spec)
            else:
                if spec.draft is None or not spec.draft.loads_as(self._spec.draft):
                    self._models.pop("draft", None)
                    self._served.pop("draft", None)
                self._spec, self._head = spec, None
                self._load_models(None)
                self._load_heads()
        except (OutriderError, RuntimeError, OSError, ValueError, LookupError) as error:
            log.info("drafters could not be loaded", exc_info=True)
            known = error.message if isinstance(error, OutriderError) else ""
            reason = known or f"{type(error).__name__}: {error}"
            field = getattr(error, "field", None) or "speculative_config"
        answer = self._agreed(field or "speculative_config", reason)
        if news.only_checks or answer.problem:
            self._spec, model, served, self._head = old
            for held, part in ((self._models, model), (self._served, served)):
                held.pop("draft", None)
                if part is not None:
                    held["draft"] = part  # type: ignore[assignment]
            return answer
        return self._with_new_drafters()

    def _with_new_drafters(self) -> WorkerReport:
        """Rebuilds the caches after new drafters were loaded."""
        assert self._report is not None, "there is a target"
        head, draft = self._head, None
        num_target, num_draft = self._num_blocks[0], 0
        with self._unfrozen():
            self._release()
            self._head = head
            if self._spec.draft is not None:
                num_draft = self._spec.draft.known_blocks or num_target
                room = replace(self._spec.draft, num_blocks=num_draft)
                draft = self._report_of("draft", room, self._models["draft"].kv_bytes_per_token())
            self._step_obstacle = self._find_step_obstacle()
            step = self.allocate(num_target, num_draft)
        report = None if head is None else head.report()
        self._report = replace(self._report, draft=draft, head=report, device_step=step)
        return self._report

    def _drafters_problem(self, spec: WorkerSpec) -> tuple[str, str]:
        """Checks new drafters without weights; returns the field at fault and why, or ""."""
        try:
            if spec.draft is not None and spec.draft != self._spec.draft:
                check_weights(spec.draft.folder, spec.size, **spec.draft.trust)
            if spec.head is not None:
                self._check_head(spec.head)
        except OutriderError as error:
            return "speculative_config.speculative_model", error.message
        return "", ""

    def _check_head(self, head: HeadConfig) -> None:
        """Raises `OutriderError` if it is not a head of this target; reads no weights."""
        facts = self._facts()
        check_head(on_this_node(head, allow_pickle=facts.allow_pickle), facts)

    def _facts(self) -> TargetFacts:
        """Returns the facts about the target that heads need, without its weights."""
        spec, info = self._spec.target, self._infos["target"]
        assert spec is not None, "there is a target"
        return TargetFacts.of(info, torch.device("meta"), spec.allow_pickle)

    def _weights_problem(self, weights: NewWeights) -> tuple[str, str]:
        """Checks if weights can be loaded; returns the field at fault and the reason, or ""."""
        field = "weights"
        try:
            spec = self._spec
            for name, model in self._model_specs().items():
                field = "weights" if name == "target" else "drafter"
                path = getattr(weights, name)
                if path:
                    size = spec.tensor_parallel_size
                    folder = replace(model, path=path).folder
                    self._served[name].check(folder, size, **model.trust)
                    if model.kv_dtype in KV_FORMATS:
                        Checkpoint(folder, **model.trust).kv_scales()
            field = "drafter"
            if weights.head and spec.head is not None and spec.target is not None:
                self._check_head(spec.head.model_copy(update={"speculative_model": weights.head}))
        except OutriderError as error:
            return field, error.message
        return "", ""

    def _load_heads(self) -> None:
        """Loads the head that drafts in this rank, or the separate head of this worker."""
        head, target = self._spec.head, self._spec.target
        if head is None:
            return
        if self._spec.head_target is not None:
            self._remote_head = RemoteHeadWorker(
                on_this_node(head, allow_pickle=self._spec.head_target.allow_pickle),
                self._spec.head_target,
                dtype_of(self._spec.head_target.dtype),
                self._device,
                self._host,
                self._spec.timeout_s,
            )
        elif target is not None:
            on_every_rank = self._collective.size > 1 and not self._target_obstacle()
            if self._group.rank == 0 or on_every_rank:
                self._head = HeadService(
                    on_this_node(head, allow_pickle=target.allow_pickle),
                    self._models["target"],
                    target.folder,
                    target.max_num_seqs,
                    allow_pickle=target.allow_pickle,
                    on_every_rank=on_every_rank,
                )

    def allocate(self, num_target_blocks: int, num_draft_blocks: int) -> DeviceStepReport:
        """Creates the KV caches; afterwards messages can be handled."""
        self._num_blocks = num_target_blocks, num_draft_blocks
        spec, report = self._spec, DeviceStepReport(False, self._step_obstacle)
        for name, part in self._model_specs().items():
            rows = part.max_num_batched_tokens if self._stage is None else 0
            self._models[name].warm_up(part.block_size, rows)
        if spec.target is not None:
            self._target = TargetService(
                self._models["target"],
                num_target_blocks,
                spec.target.block_size,
                make_rule(spec.rule, **dict(spec.rule_parameters)),
                self._head,
                self._device_step(num_target_blocks),
                spec.target.max_num_seqs,
                spec.target.num_checkpoints,
                self._stage,
                self._pooler(spec.target),
            )
            if self._target.device_step is not None:
                self._target.device_step.capture()
                report = self._target.device_step.report
        if spec.draft is not None and "draft" in self._models:
            drafts = self._allocate_draft(spec.draft, num_draft_blocks)
            report = replace(report, draft_model=drafts)
        if self._remote_head is not None:
            self._remote_head.allocate()
        return report

    def _allocate_draft(self, draft: ModelSpec, num_blocks: int) -> DeviceStepReport:
        model, block_size, ranks = self._models["draft"], draft.block_size, self._collective
        off = DeviceStepReport(False, self._chain_obstacle())
        if not self._spec.num_leases:
            given = (draft.num_scratch_blocks, draft.translation, self._chains(num_blocks))
            self._draft = DraftService(model, num_blocks, block_size, ranks, *given)
            return self._draft.capture() or off

        def make(num_blocks: int, num_scratch_blocks: int, table: bytes) -> DraftService:
            return DraftService(model, num_blocks, block_size, ranks, num_scratch_blocks, table)

        assert self._report is not None, "it was loaded"
        assert self._report.draft is not None, "there is a draft model"
        report = replace(self._report, draft=replace(self._report.draft, num_blocks=num_blocks))
        self._shared = SharedDrafts(make, report, self._spec.num_leases)
        return off

    def _pooler(self, target: ModelSpec) -> Pooler | None:
        """Returns what computes embeddings or scores, if the checkpoint supports them."""
        if self._collective.rank != 0:
            return None
        folder = target.folder
        if self._pooling is None:  # other weights of the same model need not declare pooling again
            self._pooling = read_pooling(folder, dict(target.hf_overrides))
        if isinstance(self._pooling, str):
            return None
        return Pooler.load(self._pooling, folder, self._device, allow_pickle=target.allow_pickle)

    def handle(self, message: Message) -> Reply:
        """Handles `message`; returns None on ranks whose answer is not used."""
        reply = self._handlers[type(message)](message)
        return reply.result() if isinstance(reply, PendingReply) else reply

    def begin(self, message: Message) -> Reply | PendingReply:
        """Handles `message` without waiting for a step that the device computes."""
        return self._handlers[type(message)](message)

    def _leased(self, message: Leased) -> Reply:
        assert self._shared is not None, "the draft model is not shared"
        if not isinstance(message.message, DraftStep):
            return self._shared.handle(message)
        with self._draft_threads.step(message.message.plan.num_tokens):
            return self._shared.handle(message)

    def _draft_step(self, message: DraftStep) -> Drafted | None:
        if "draft" not in self._models:
            assert self._stage is not None, "no draft model was loaded"
            return None
        assert self._draft is not None, "no draft model was allocated"
        with self._draft_threads.step(message.plan.num_tokens):
            return self._draft.draft(message)

    def _awaits(self) -> int:
        return -1 if self._draft is None else self._draft.awaits

    def _go_on(self, verdict: Verdict) -> None:
        assert self._draft is not None, "it awaits the verdict"
        with self._draft_threads.step(len(verdict.emitted)):
            self._draft.go_on(verdict)

    def _verify(self, plan: StepPlan) -> Verdict | PendingReply | None:
        assert self._target is not None, "no target was allocated"
        with self._threads.step(plan.num_tokens):
            verdict = self._target.post(plan, self._group.rank)
        if isinstance(verdict, PendingReply):
            return verdict
        if verdict is None or not self._threads.has_news:
            return verdict
        return replace(verdict, thread_choices=self._threads.news())

    def close_links(self) -> None:
        """Closes feature links; the channel must be closed already."""
        if self._target is not None:
            self._target.close_feeds()
        for end in (self._remote_head, self.beside):
            if end is not None:
                end.close_links()

    def close(self) -> None:
        """Leaves the group without waiting for the others."""
        self._group.abort()

    def _handle_head(self, message: HeadAsk | ListenFeatures | OpenFeatures) -> Reply:
        """Handles messages for separate heads, at the target's end and at the head's."""
        if isinstance(message, OpenFeatures):
            assert self._target is not None, "no target was allocated"
            self._target.note_feed(message)
            if self._group.rank == 0:
                self._target.open_feed(message)
            elif self._stage is not None and self._collective.rank == 0:
                self._target.pass_on(message)
            return None
        if isinstance(message, ListenFeatures):
            end = self._remote_head or self.beside
            assert end is not None, "nothing reads what the target sends"
            return end.listen(message)
        assert self._remote_head is not None, "no head was allocated"
        return self._remote_head.draft(message, self._threads)

    def _device_step(self, num_blocks: int) -> SeatSizes | None:
        """Returns the sizes of the device step; None if every step is planned on the host."""
        spec, model = self._spec.target, self._models.get("target")
        if spec is None or model is None or self._step_obstacle:
            return None
        num_draft_nodes = self._spec.head.max_nodes if self._spec.head else 0
        return SeatSizes(
            spec.max_num_seqs,
            spec.longest(model.info.max_model_len),
            num_blocks,
            spec.block_size,
            num_draft_nodes,
            model.info.vocab_size,
            has_chances=self._head is not None and self._head.head.has_chances,
            fed_layers=self._fed_layers,
            p_min=self._spec.head.p_min if self._spec.head else 0.0,
        )

    def _chains(self, num_blocks: int) -> ChainSizes | None:
        """Returns the sizes of a draft model's device step; None: the host runs each forward."""
        if self._spec.draft is None or self._chain_obstacle():
            return None
        return ChainSizes.of(self._spec.draft, self._models["draft"].info, num_blocks)

    def _chain_obstacle(self) -> str:
        """Returns why no chain is drawn in one graph, or ""; the same on every rank."""
        if (model := self._models.get("draft")) is None:
            return "there is no draft model"
        return self._device_obstacle() or chain_obstacle(model, self._spec)

    def _find_step_obstacle(self) -> str:
        """Returns why the target's steps are planned on the host, or ""; the same on every rank."""
        if "target" not in self._models:
            return "there is no target"
        reason = self._target_obstacle()
        if reason:
            return reason
        reason = self._find_fed_layers()
        if self._head is not None and self._spec.head is not None:  # every rank has it
            reason = head_obstacle(self._head, self._spec.head.max_nodes) or reason
        if self._spec.head is None and not self._spec.fed_heads:
            return ""
        return Agreement(self._collective, self._device).problem(reason)

    def _find_fed_layers(self) -> str:
        """Finds the layers whose inputs separate heads read; returns why this failed, or ""."""
        layers: set[int] = set()
        try:
            for section in self._spec.fed_heads:
                layers.update(captured_layers(section, self._facts()))
        except (OutriderError, OSError) as error:
            return f"what a separate head reads is unknown: {' '.join(str(error).split())[:300]}"
        self._fed_layers = tuple(sorted(layers))
        return ""

    def _target_obstacle(self) -> str:
        """Returns the part of that reason that is known without a head; the same on every rank."""
        return self._device_obstacle() or obstacle(self._models["target"], self._spec.rule)

    def _device_obstacle(self) -> str:
        """Returns the part of that reason that does not depend on a model."""
        if self._spec.device_step == "off":
            return "it is turned off"
        if self._stage is not None:
            return "the target has pipeline stages"
        return "" if self._device.type == "cuda" else f"the device is {self._device.type!r}"

    def _report_of(self, name: str, spec: ModelSpec, all_bytes_per_token: int) -> ModelReport:
        model = self._models[name]
        info = model.info
        max_model_len = spec.longest(info.max_model_len)
        if spec.num_blocks is not None:
            num_blocks = spec.num_blocks + spec.num_scratch_blocks
            check_blocks(num_blocks, spec.block_size, all_bytes_per_token, self._device, 1)
        return ModelReport(
            architecture=info.architecture,
            vocab_size=info.vocab_size,
            max_model_len=max_model_len,
            num_blocks=spec.known_blocks or self._room(all_bytes_per_token, max_model_len, spec),
            block_size=spec.block_size,
            kv_bytes_per_token=model.kv_bytes_per_token(),
            state_bytes=model.state_bytes,
            eos_token_ids=info.eos_token_ids,
            dtype=str(info.dtype).removeprefix("torch."),
            forward=model.forward_choice.kind,
            forward_reason=model.forward_choice.reason,
            operations=model.forward_choice.operations,
        )

    def _room(self, kv_bytes_per_token: int, max_model_len: int, spec: ModelSpec) -> int:
        """Returns the blocks that fit beside the device step and states (raises as `room_of`)."""
        taken_bytes = state_bytes = 0
        if (sizes := self._device_step(0)) is not None:
            taken_bytes = reserved_bytes(sizes, self._models["target"].info, self._collective.size)
            taken_bytes += self._head.spare_bytes() if self._head else 0
        if (chains := self._chains(0)) is not None:
            taken_bytes += chain_bytes(chains, self._models["draft"].info, self._collective.size)
        # On a CPU, `kv_cpu_bytes` limits only keys and values.
        if self._spec.target is not None and self._device.type == "cuda":
            num_states = self._spec.target.max_num_seqs + self._spec.target.num_checkpoints
            state_bytes = num_states * self._models["target"].state_bytes
        return room_of(
            spec, kv_bytes_per_token, max_model_len, self._device, taken_bytes, state_bytes
        )
