"""`outrider calibrate`: checks whether a head is read correctly, and searches for its best tree.

A head that is read incorrectly (a layer off by one, another rotary base, ...) drafts badly without
an error. The command measures it on text that the target generates, tries the settings in which
published configurations differ, and prints a section with the best ones. The measurement is in
`training/calibration.py`, the settings to try in `drafters/registry.py`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..config.strict import tag, unknown_key
from ..errors import CheckpointError, ConfigError
from .console import check_writable, err, grid, note, say, write_json
from .options import EngineOptions, Options, numbers

if TYPE_CHECKING:
    from ..config import EngineConfig, HeadConfig, PARDConfig
    from ..training.calibration import Calibrator, Measured, SearchedTree

_MEASURED_NODES = 512  # nodes of the tree with which ranks are measured
_MEASURED_RANKS = 10
_DEEPEST = 6
_SIGNIFICANT = 3.0  # standard errors by which a variant must be better to be chosen


class CalibrationOptions(Options):
    """Options of the measurement."""

    panel = "Calibration"
    prompts: Path | None = None
    """One prompt per line, or .jsonl with `text`; default: the demo's held-out prompts."""
    num_prompts: int = Field(16, ge=1, description="Prompts.")
    max_tokens: int = Field(96, ge=8)
    """Tokens by which the target continues each prompt."""
    num_points: int = Field(1024, ge=16, description="Drafts per variant.")
    sweep: str = Field("all", description="Keys to try other readings of, a list; or all, or none.")
    tree_nodes: str = "4,8,16,32,63"
    """Node budgets for the search of static trees, a list; 0: no search."""
    out: Path | None = Field(None, description="Write all figures as JSON.")

    def keys(self) -> tuple[str, ...] | None:
        """Returns the keys to vary; None: all."""
        return None if self.sweep == "all" else tuple(key.strip() for key in self.sweep.split(","))

    def budgets(self) -> list[int]:
        """Returns the node budgets in ascending order."""
        wanted = "numbers up to 1024 like 8,16,32"
        found = numbers("tree_nodes", self.tree_nodes, Annotated[int, Field(ge=0, le=1024)], wanted)
        return sorted({*found} - {0})


def calibrate(engine: EngineOptions, options: CalibrationOptions) -> None:
    """Checks whether a head is read correctly, tries variants, searches its best static tree."""
    budgets = options.budgets()
    check_writable(options.out, "out")
    config = engine.resolve()
    from ..drafters.registry import method_of

    section = _head(config)
    _check_keys(options, section)
    calibrator = _calibrator(config, options)
    report: dict[str, Any] = {"model": config.model, "num_texts": len(calibrator.texts)}
    with err().status("Measuring...") as status:
        sweep = Sweep(calibrator, section, options.num_points, status.update)
        base = sweep.measure({})
        best = {} if options.sweep == "none" else sweep.best(options.keys())
        chosen = sweep.section(best)
        report["variants"] = [row.as_dict() for row in sweep.rows]
        found = next(row for row in sweep.rows if row.update == best)
        longest = max((walk.num_nodes for walk in base.measured.walks), default=0)
        depth = min(chosen.draft_len, longest, _DEEPEST)
        wide = _wide(chosen, depth) if budgets else None
        trees = []
        if wide is not None:
            status.update("Measuring a wide tree")
            trees = _trees(calibrator.measure(wide, options.num_points), depth, budgets)
    _show(sweep.rows, base.measured, section.draft_len, best)
    report["best"] = best
    report["trees"] = [
        {"num_nodes": len(tree.choices), "expected_tokens_per_step": tree.tokens_per_step,
         "measured_tokens_per_step": measured, "choices": [list(path) for path in tree.choices]}
        for tree, measured in trees
    ]  # fmt: skip
    _show_trees(trees)
    if any(not tree.choices for tree, _ in trees):
        note("No guess of this head was right at any point: there is no tree to draft.")
    write_json(options.out, report, "out")
    gain = found.measured.tokens_per_step - base.measured.tokens_per_step
    if best:
        note(f"The checkpoint is better read otherwise: {gain:+.2f} tokens per step.")
    elif options.sweep != "none":
        note("No other reading is better.")
    if len(trees) == 1:  # a single size was requested, so its tree is used
        chosen = method_of(chosen).with_tree(chosen, trees[0][0].choices) or chosen
    given = chosen.model_dump(mode="json", exclude_defaults=True)
    say(json.dumps({**given, "decoding_type": tag(type(chosen))}))


@dataclass(frozen=True)
class Row:
    """One measured variant."""

    update: dict[str, Any]
    measured: Measured

    @property
    def label(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.update.items()) or "as configured"

    def as_dict(self) -> dict[str, Any]:
        depth = max((len(walk.ranks) for walk in self.measured.walks), default=0)
        return {
            "update": self.update,
            "tokens_per_step": self.measured.tokens_per_step,
            "standard_error": self.measured.error,
            "expected_if_sampled": self.measured.expected,
            "acceptance": self.measured.acceptance(depth),
        }


class Sweep:
    """Varies one key at a time and keeps each improvement."""

    def __init__(
        self, calibrator: Calibrator, section: HeadConfig | PARDConfig, num_points: int, tell: Any
    ) -> None:
        self.rows: list[Row] = []
        self._calibrator = calibrator
        self._section = section
        self._num_points = num_points
        self._tell = tell

    def section(self, update: dict[str, Any]) -> HeadConfig | PARDConfig:
        given = self._section.model_dump(exclude_unset=True)
        return type(self._section).model_validate({**given, **update})

    def measure(self, update: dict[str, Any]) -> Row:
        self._tell(f"Measuring: {update or 'as configured'}")
        measured = self._calibrator.measure(self.section(update), self._num_points)
        self.rows.append(Row(update, measured))
        return self.rows[-1]

    def best(self, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Returns the changes of `keys` that significantly increase acceptance when combined.

        Raises:
            ConfigError: a key has no variants for this head.
        """
        from ..drafters.registry import Variant, method_of

        base = self.rows[0]
        facts = self._calibrator
        method = method_of(self._section)
        found = []
        if method.variants is not None:
            capture, num_layers = base.measured.capture, facts.model.info.num_layers
            found += method.variants(capture, num_layers, facts.rope_theta())
        if method.mask_tokens is not None:
            candidates = method.mask_tokens(Path(str(self._section.speculative_model)))
            found.append(Variant("mask_token_id", candidates))
        known = [variant.key for variant in found]
        if surplus := set(keys or ()) - set(known):
            raise ConfigError.at(
                "sweep",
                f"{sorted(surplus)[0]!r} has no variants for this head; "
                f"known: {', '.join(known) or 'none'}",
            )
        best: Row = base
        for variant in found:
            if keys is not None and variant.key not in keys:
                continue
            for value in variant.values:
                # Some checkpoints cannot be read with some variants.
                with suppress(CheckpointError, ConfigError, ValueError):
                    row = self.measure({**best.update, variant.key: value})
                    best = row if _better(row, best) else best
        return best.update


def _better(row: Row, other: Row) -> bool:
    gain, error = row.measured.gain_over(other.measured)
    accepts = row.measured.tokens_per_step >= other.measured.tokens_per_step
    return accepts and gain > _SIGNIFICANT * error


def _head(config: EngineConfig) -> HeadConfig | PARDConfig:
    """Returns the section of the head or of the draft model with masks, with an absolute path.

    Its placement does not matter here.

    Raises:
        ConfigError: the configuration has no head, or several.
    """
    from ..config import PARDConfig
    from ..engine.checkpoints import draft_sections, head_sections, resolved

    config = resolved(config)
    masked = [each for _, each in draft_sections(config) if isinstance(each, PARDConfig)]
    sections: list[HeadConfig | PARDConfig] = [*head_sections(config), *masked]
    if len(sections) != 1:
        raise ConfigError.at(
            "speculative_config.decoding_type",
            f"{config.speculative_config.decoding_type} has "
            f"{len(sections) or 'no'} heads; one is calibrated at a time",
        )
    (section,) = sections
    if not isinstance(section, PARDConfig):
        return section.at_its_place(config.model)
    folder = str(Path(section.speculative_model).resolve())
    return section.model_copy(update={"speculative_model": folder})


def _check_keys(options: CalibrationOptions, section: HeadConfig | PARDConfig) -> None:
    """Raises `ConfigError` for a key that the section does not have, before anything is loaded."""
    known = type(section).model_fields
    for key in options.keys() or () if options.sweep != "none" else ():
        if key not in known:
            raise unknown_key("sweep", key, known)


def _calibrator(config: EngineConfig, options: CalibrationOptions) -> Calibrator:
    from ..bench.suite.workloads import load_prompts
    from ..engine.checkpoints import load_tokenizer
    from ..scheduler.types import ints
    from ..training.calibration import Calibrator
    from ..workers.devices import dtype_of, pick_device

    texts = load_prompts(options.prompts, options.num_prompts)
    tokenizer = load_tokenizer(config)
    prompts = [ints(ids) for text in texts if (ids := tokenizer.encode(text))]
    if not prompts:
        raise ConfigError.at("prompts", "they hold no tokens")
    with err().status("Loading the target; it writes its text..."):
        return Calibrator(
            Path(config.model),
            prompts,
            options.max_tokens,
            device=pick_device(config.device),
            dtype=dtype_of(config.dtype),
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )


def _wide(section: HeadConfig | PARDConfig, depth: int) -> HeadConfig | None:
    """Returns `section` with a tree for measuring ranks; None if it drafts no static trees."""
    from ..drafters.registry import method_of
    from ..training.calibration import wide_tree

    if depth == 0:
        return None
    choices = wide_tree(depth, _MEASURED_NODES, _MEASURED_RANKS)
    return method_of(section).with_tree(section, choices)


def _trees(measured: Measured, depth: int, budgets: list[int]) -> list[tuple[SearchedTree, float]]:
    """Returns the best static tree of each size, and its yield on points not used to choose it."""
    from ..training.calibration import rank_table, search_tree, tokens_per_step

    walks = [walk.ranks for walk in measured.walks]
    seen, unseen = walks[::2], walks[1::2]
    table = rank_table(seen, depth, _MEASURED_RANKS)
    trees = [search_tree(table, budget) for budget in budgets]
    return [(tree, tokens_per_step(unseen, tree.choices)) for tree in trees]


def _show(rows: list[Row], base: Measured, depth: int, best: dict[str, Any]) -> None:
    levels = min(depth, 8)
    cells = [
        (
            row.label,
            f"{row.measured.tokens_per_step:.3f} ±{row.measured.error:.3f}",
            f"{row.measured.expected:.3f}",
            *(f"{rate:.3f}" for rate in row.measured.acceptance(levels)),
        )
        for row in rows
    ]
    columns = ("", "tokens/step", "if sampled", *(f"P(>{level})" for level in range(levels)))
    shown = grid("Readings of the head", columns, cells)
    shown.row_styles = ["bold green" if row.update == best else "" for row in rows]
    err().print(shown)
    note(f"{len(base.walks)} drafts each; P(>d): more than d tokens of a draft are accepted.")


def _show_trees(trees: list[tuple[SearchedTree, float]]) -> None:
    columns = ("nodes", "depth", "expected tokens/step", "on other points")
    cells = [
        (
            str(len(tree.choices)),
            str(max((len(path) for path in tree.choices), default=0)),
            f"{tree.tokens_per_step:.3f}",
            f"{measured:.3f}",
        )
        for tree, measured in trees
    ]
    if cells:
        err().print(grid("Best static trees", columns, cells))
