"""Many devices in one call: their steps are vectorised over devices, traced once, and run as a flat program."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core import tree
from shoal.core.chance import chance
from shoal.core.device import finish
from shoal.core.train import Course, Scene, advance, functional, gated
from shoal.core.types import Batch
from shoal.engines.cohort import Cohort, Member, laid
from shoal.engines.crew import Done, Task
from shoal.engines.knobs import knobs_of, turned
from shoal.engines.program import Program, Step, traced
from shoal.engines.serial import Serial

log = logging.getLogger("shoal")


class Batched:
    """Sorts tasks into cohorts of a given width and trains each as one."""

    def __init__(self, width: int):
        self.width = width
        self.programs: dict[tuple, Program] = {}
        self.refused: set[tuple] = set()

    def train(self, tasks: Sequence[Task]) -> list[Done]:
        knobs = knobs_of({id(t.site): t.site for t in tasks}.values())
        order = sorted(range(len(tasks)), key=lambda i: -expected(tasks[i]))
        done: dict[int, Done] = {}
        for first in range(0, len(order), self.width):
            chosen = order[first : first + self.width]
            forms: dict[tuple, list[int]] = {}
            members = {i: Member(tasks[i]) for i in chosen}
            for i in chosen:
                forms.setdefault(members[i].form(knobs), []).append(i)
            for form, own in forms.items():
                cohort = Cohort([members[i] for i in own], knobs, len(own), batch_of([members[i] for i in own]))
                done |= dict(zip(own, self.together(form, cohort)))
        return [done[i] for i in range(len(tasks))]

    def together(self, form: tuple, cohort: Cohort) -> list[Done]:
        """One cohort from start to end; by `serial` where the step cannot be vectorised."""
        carried, losses = self.run(form, cohort)
        lost = losses.tolist()
        ends = zip(cohort.members, cohort.ends(carried), lost)
        return [Done(*finish(m.site, m.visit, end, loss / m.steps, m.macs)) for m, end, loss in ends]

    def run(self, form: tuple, cohort: Cohort) -> tuple[list[Tensor], Tensor]:
        carried, fixed = cohort.carried(), None
        losses = torch.zeros(max(cohort.width, 1), dtype=torch.float64, device=cohort.place)
        data = [cohort.samples.inputs, cohort.samples.targets]
        with torch.no_grad():
            for segment in cohort.segments(1, alike=False):
                frame = [t[0] for t in segment.tensors]
                key = (form, cohort.width, cohort.batch, segment.padded)
                if key not in self.programs:
                    step = step_of(cohort, segment.padded)
                    self.programs[key] = traced(step, carried, cohort.fixed(), [*data, *frame], in_place=True)
                program = self.programs[key]
                if fixed is None or fixed[0] != program.reads:
                    fixed = (program.reads, cohort.fixed(program.reads))
                carried, loss = program(*carried, *fixed[1], *data, *frame)
                losses += torch.where(cohort.live[segment.first].to(cohort.place), loss, 0)
        return carried, losses

    def close(self) -> None:
        self.programs.clear()


def step_of(cohort: Cohort, padded: bool) -> Step:
    """One step of all lanes as a function of flat tensors."""
    site, knobs, width, batch = cohort.site, cohort.knobs, cohort.width, cohort.batch
    first = cohort.members[0]
    course, scene, draws = first.visit.course, first.visit.scene, first.first
    settled = [first.fixed, []]
    counts = (len(list(tree.tensors(draws))), len(site.augment.draw(torch.Generator(), 1)) if site.augment else 0)
    fixed_count = len(list(tree.tensors(first.fixed)))

    def one(carried, fixed, x, y, rest):
        own: Course = tree.refilled(course, carried)
        anchor, got, numbers, mask = tree.refilled(first.fixed, fixed[:fixed_count])
        weight, live = (rest[0], rest[1]) if padded else (None, None)
        now, epoch, *drawn = rest[2:] if padded else rest
        parts = tree.refilled(draws, drawn[: counts[0]])
        images, layers = drawn[counts[0] : sum(counts)], iter(drawn[sum(counts) :])
        scene = Scene(anchor, got, numbers | {"step": now, "epoch": epoch}, parts, mask)
        if site.augment:
            x = site.augment.turned(x, images)
        rule = turned(site, knobs, fixed[fixed_count:])
        with chance(site.net.draws, site.net.mixes_batch, lambda _: next(layers), weight):
            new, scored = advance(rule, own, Batch(x, ((y, None),), weight), scene, functional)
        if live is not None:
            new = gated(live, new, own)
        return list(tree.tensors(new)), scored.loss

    def step(carried, fixed, frame):
        inputs, targets, rows, *rest = frame
        if width == 1:
            return one(carried, fixed, laid(inputs.index_select(0, rows)), targets.index_select(0, rows), rest)
        flat = rows.flatten()
        x = inputs.index_select(0, flat).view(width, batch, *inputs.shape[1:])
        y = targets.index_select(0, flat).view(width, batch, *targets.shape[1:])
        return torch.vmap(one)(carried, fixed, x, y, rest)

    return step


def expected(task: Task) -> float:
    """About how many steps a task will take, before it is looked at closely."""
    work = task.job.work
    return work.steps or work.epochs * len(task.site.samples(task.job.device)) / work.batch


def batch_of(members: Sequence[Member]) -> int:
    """The width of a cohort's batches: whole ones, unless nobody has so many samples."""
    return max(max(m.sizes) for m in members)
