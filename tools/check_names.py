"""Check that the names of a package can be searched for: python tools/check_names.py [src/shoal]

Two complaints, and the exit code 1 where there are more of one kind than are allowed:

- doubled: a public function or class at the top of two modules. A search for such a name finds the wrong one.
- vague: a function, class or method whose whole name is one participle, adverb or pronoun ("told", "kept", "nearly",
  "some"). Such a name says neither what is done nor what comes out.

The package's own `__init__.py` is the public facade and may repeat names of the modules behind it. What else may stay,
and why, is in the two tables below; an entry that nothing needs any more is a complaint, too.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_DOUBLED = 0
MAX_VAGUE = 0

ALLOWED_DOUBLES: dict[str, str] = {}
"""Public names that several modules define, each with the reason."""
ALLOWED_VAGUE: dict[str, str] = {
    "Terminated": "an exception, named after what happened as `KeyboardInterrupt` is; the exit code is `terminated`",
    "Weighted": "a part: expressions and recipes write `weighted`, the word for this way of selecting devices",
}
"""Names of one vague word, each with the reason."""

PARTICIPLES = frozenset(
    "begun bound bought broken brought built caught chosen cut dealt done drawn driven eaten fallen felt fitted fought "
    "found given gone grown heard held hidden kept known laid led left lent lost made meant met paid put read risen "
    "said seen sent set shown shut sold sought spent spoken spread stood stuck sworn taken taught thought told "
    "torn understood won worn woven written".split()
)
"""Irregular ones; those that end in -ed are found by their ending."""
ADVERBS = frozenset(
    "above again ago ahead alike almost alone along already also always anew apart around aside away back before "
    "behind below beside besides beyond elsewhere enough ever here hence instead later maybe never next now off often "
    "once onward perhaps quite rather since sometimes soon still then there thus together too twice under well "
    "within without yet".split()
)
PRONOUNS = frozenset(
    "all another any anybody both each either everybody everything few former his hers it its itself latter many "
    "mine most much neither nobody none nothing one others our ours own same self several some somebody something "
    "such that theirs them these they this those what whatever which whichever who whoever whom whose yours".split()
)
ADJECTIVES = frozenset("due fresh odd plain rest silent whole".split())
"""Adjectives and the like that were once names here and told nothing."""
VAGUE_WORDS = PARTICIPLES | ADVERBS | PRONOUNS | ADJECTIVES

VERBS_ALIKE = frozenset("cut put read set spread".split())
"""Participles that are also the verb's plain form, hence good names for a function."""
NO_PARTICIPLES = frozenset("bed embed exceed feed heed need proceed reed seed shed shred speed succeed weed".split())
NO_ADVERBS = frozenset("apply assembly comply family fly imply multiply poly rely reply supply tally".split())


@dataclass(frozen=True, order=True)
class Definition:
    """A function or class: where it is, its name, and whether it stands at the top of its module."""

    path: Path
    line: int
    name: str
    is_top_level: bool
    is_prescribed: bool
    """Whether a decorator says that a base class prescribes the name."""

    def __str__(self) -> str:
        return f"{self.path.as_posix()}:{self.line}"


def is_vague(name: str) -> bool:
    """Whether a name is one word that says nothing; underscores at its ends do not count."""
    word = name.strip("_")
    word = word[:1].lower() + word[1:]
    if not word.islower() or word in VERBS_ALIKE:  # a capital inside begins a second word
        return False
    if word in VAGUE_WORDS:
        return True
    is_participle = re.fullmatch(r"[a-z]{2,}ed", word) is not None and word not in NO_PARTICIPLES
    is_adverb = re.fullmatch(r"[a-z]{2,}ly", word) is not None and word not in NO_ADVERBS
    return is_participle or is_adverb


def find_definitions(path: Path) -> Iterator[Definition]:
    """Every function, class and method of a module, those inside functions too."""
    module = ast.parse(path.read_text(encoding="utf-8"), str(path))
    top = set(_list_top_level(module.body))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            yield Definition(path, node.lineno, node.name, node in top, "override" in marks)


def _list_top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under a top-level `if` or `try` too."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody") if isinstance(statement, ast.If | ast.Try | ast.With) else ():
            yield from _list_top_level(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _list_top_level(handler.body)


def find_doubled_names(definitions: Iterable[Definition], facade: Path) -> dict[str, list[Definition]]:
    """Public top-level names that more than one module defines, by name."""
    by_name: dict[str, dict[Path, Definition]] = defaultdict(dict)
    for one in definitions:
        if one.is_top_level and not one.name.startswith("_") and one.path != facade:
            by_name[one.name].setdefault(one.path, one)
    return {name: sorted(places.values()) for name, places in sorted(by_name.items()) if len(places) > 1}


def find_vague_names(definitions: Iterable[Definition]) -> list[Definition]:
    """Definitions whose name is one vague word, unless a base class of somebody else prescribes it."""
    return sorted(one for one in definitions if is_vague(one.name) and not one.is_prescribed)


def check_package(
    package: Path, allowed_doubles: Iterable[str] = ALLOWED_DOUBLES, allowed_vague: Iterable[str] = ALLOWED_VAGUE
) -> list[str]:
    """The complaints about a package, one line each; none where its names are as they should be."""
    allowed_doubles, allowed_vague = set(allowed_doubles), set(allowed_vague)
    definitions = [one for path in sorted(package.rglob("*.py")) for one in find_definitions(path)]
    doubled = find_doubled_names(definitions, package / "__init__.py")
    vague = find_vague_names(definitions)
    complaints = [
        f"{name!r} is allowed to be {kind} and is not any more: take it out of the table"
        for kind, allowed, present in (
            ("doubled", allowed_doubles, set(doubled)),
            ("vague", allowed_vague, {one.name for one in vague}),
        )
        for name in sorted(allowed - present)
    ]
    new_doubled = {name: places for name, places in doubled.items() if name not in allowed_doubles}
    new_vague = [one for one in vague if one.name not in allowed_vague]
    if len(new_doubled) > MAX_DOUBLED:
        complaints += [
            f"{places[0]}: {name!r} is also defined in {', '.join(map(str, places[1:]))}: give each its own name"
            for name, places in new_doubled.items()
        ]
    if len(new_vague) > MAX_VAGUE:
        complaints += [f"{one}: {one.name!r} says nothing: name what it does or what it gives" for one in new_vague]
    return complaints


def main(arguments: list[str]) -> int:
    package = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1] / "src" / "shoal"
    if not package.is_dir():
        print(f"{package} is no folder", file=sys.stderr)
        return 2
    complaints = check_package(package)
    print("\n".join(complaints) or "Names: none doubled, none vague.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
