"""What parts cannot be used together, and claims of a part that nobody knows: refused when a method is composed."""

from collections.abc import Callable, Sequence
from dataclasses import fields

from shoal.core.errors import ShoalError
from shoal.core.extras import READABLE
from shoal.core.learning_task import LearningTask
from shoal.core.metric import Metric
from shoal.core.part import Part
from shoal.core.wire import STAGES


def refuse_clashes(parts: Sequence[Part]) -> None:
    """Raise an error that names two parts which clash, why, and what to write instead."""
    for part in parts:
        _check_claims(part)
    _refuse_two(parts, lambda p: p.name(), "it is listed twice", "List it once.")
    _refuse_two(
        parts,
        lambda p: "combine" if p.acts_at("combine") else None,
        "both decide how replies are combined, and only one rule can",
        "Keep one of them.",
    )
    for point, what in (
        ("select", "which devices take part"),
        ("plan", "which part of the model each device trains"),
        ("weigh", "the weights of the replies"),
    ):
        _refuse_two(
            parts,
            lambda p, point=point: point if point in p.sets else None,
            f"both set {what}",
            "Keep one of them; parts that only scale can be added freely.",
        )
    _refuse_two(
        parts,
        lambda p: "steps" if p.corrects_steps else None,
        "both correct local steps by what other devices did, and together they would correct twice",
        "Keep one of them.",
    )
    _refuse_two(
        parts,
        lambda p: "loss" if p.replaces_loss else None,
        "both replace the local loss",
        "Keep one of them; losses that add a term can be added freely.",
    )
    _refuse_two(
        parts,
        lambda p: "gradient" if p.replaces_gradient or p.perturbs_gradient else None,
        "both decide where the gradient is taken",
        "Keep one of them.",
    )
    _refuse_two(
        parts,
        lambda p: "finetune" if p.acts_at("finetune") else None,
        "both say how long a device trains its own model before it uses it",
        "Keep one of them.",
    )
    for direction in ("up", "down"):
        _refuse_two(
            parts,
            lambda p, d=direction: p.stage if p.stage and d in p.directions else None,
            "both are codecs of the same stage, and the second would code the first one's code",
            "Keep one codec of each stage (rows, sparsify, quantise, pack).",
        )
    _refuse_two(
        parts,
        lambda p: "layers" if p.keeps_layers in ("head", "body") else None,
        "both divide the model into layers that stay on devices and layers that travel",
        "Keep one of them.",
    )
    _refuse_two(
        parts,
        lambda p: "frozen" if p.freezes_rest else None,
        "both choose what of the model is trained and freeze the rest",
        "Keep one of them.",
    )
    own = next((p for p in parts if p.keeps_layers), None)
    served = next((p for p in parts if p.needs_server_model), None)
    if own and served:
        raise make_clash_error(
            own,
            served,
            f"{own.name()} keeps layers on devices, and {served.name()} works with the whole model on the server",
            "Keep one of them.",
        )
    whole = next((p for p in parts if p.needs_whole), None)
    partial = next((p for p in parts if "plan" in p.sets or p.stage == "rows"), None)
    if whole and partial:
        raise make_clash_error(
            whole,
            partial,
            f"{whole.name()} needs replies that cover the whole model, and {partial.name()} leaves some of it out",
            "Keep one of them.",
        )
    values = next((p for p in parts if p.carries == "values"), None)
    delta = next((p for p in parts if p.stage and p.codes_delta), None)
    if values and delta:
        raise make_clash_error(
            values,
            delta,
            f"{values.name()} returns whole models, and {delta.name()} codes only differences",
            f"Leave {delta.name()} out, or use a codec of plain values.",
        )


def refuse_task(parts: Sequence[Part], task: LearningTask) -> None:
    """Refuse parts that need class labels where the task has none."""
    part = next((p for p in parts if p.needs_class_logits), None)
    if part is None or task.has_class_logits:
        return
    problem = (
        f"{part} cannot be used with the task {task.name}: it needs targets that are classes, and a logit for each."
    )
    advice = f"Leave {part.name()} out" + (
        ", or use the task classify with 2 classes." if task.predict_classes else "."
    )
    raise ShoalError("clash", problem, advice)


def _check_claims(part: Part) -> None:
    """Raise where a class attribute of a part (stage, sets, directions, carries, reads) has an unknown value."""
    stages = STAGES if part.acts_at("encode") or part.acts_at("decode") else ("", *STAGES)
    for claim, value, known in (
        ("stage", {part.stage}, stages),
        ("sets", part.sets, ("select", "plan", "weigh")),
        ("directions", part.directions, ("up", "down")),
        ("carries", {part.carries}, ("delta", "values")),
        ("reads", part.reads, READABLE),
        ("keeps_layers", {part.keeps_layers}, ("", "head", "body", "norms")),
    ):
        for word in value:
            if word not in known:
                problem = f"The part {part.name()} has {claim} = {word!r}."
                raise ShoalError("bad-part", problem, f"Known are {', '.join(map(repr, known))}.")
    for option in fields(part):
        if hasattr(Part, option.name):
            problem = (
                f"The part {part.name()} has a field {option.name}, which is the name of something every part has."
            )
            raise ShoalError("bad-part", problem, "Give the field another name.")
    for metric in part.metrics:
        if not isinstance(metric, Metric) or not metric.name.isidentifier():
            problem = (
                f"The part {part.name()} lists {metric!r} among its metrics, which is no metric with a plain name."
            )
            raise ShoalError("bad-part", problem, 'Write them as (Metric("step", "length of a step"),).')


def _refuse_two(parts: Sequence[Part], claim: Callable[[Part], str | None], why: str, advice: str) -> None:
    """Raise where two parts make the same claim; None is no claim."""
    owners: dict[str, Part] = {}
    for part in parts:
        claimed = claim(part)
        if claimed is not None and owners.setdefault(claimed, part) is not part:
            raise make_clash_error(owners[claimed], part, why, advice)


def make_clash_error(a: Part, b: Part, why: str, advice: str) -> ShoalError:
    pair = f"{a.name()} and {b.name()} cannot be used together" if a.name() != b.name() else f"{a.name()} is refused"
    return ShoalError("clash", f"{pair}: {why}.", advice)
