"""500 JSON schemas of the kinds that are in use, from a seed: each family is a set of templates written by hand.

A template fixes what a schema is about and how it is built; the seed decides which of its parts are there, their
bounds, and the titles, descriptions, defaults and examples beside them. Nothing here compiles or checks a schema.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from schema_corpus.article_schemas import ARTICLES
from schema_corpus.body_schemas import BODIES
from schema_corpus.cluster_schemas import CLUSTER_OBJECTS
from schema_corpus.configuration_schemas import CONFIGURATIONS
from schema_corpus.event_schemas import EVENTS
from schema_corpus.function_schemas import FUNCTIONS
from schema_corpus.parts import Make, Schema
from schema_corpus.recursive_schemas import RECURSIVE

SEED = 19
FAMILIES: Mapping[str, tuple[int, Sequence[Make]]] = {
    "function calls": (110, FUNCTIONS),
    "configuration files": (100, CONFIGURATIONS),
    "references and recursion": (70, RECURSIVE),
    "tracked events": (70, EVENTS),
    "cluster objects": (60, CLUSTER_OBJECTS),
    "bodies of HTTP APIs": (50, BODIES),
    "articles": (40, ARTICLES),
}
"""How many schemas each family has, and its templates, which take turns."""


@dataclass(frozen=True)
class Case:
    """One schema; its name says how to make it again."""

    name: str
    family: str
    schema: Schema


def cases(seed: int = SEED) -> list[Case]:
    """All schemas, those of the families in turns, so that the first ones are of all families."""
    families = [list(_family(name, seed)) for name in FAMILIES]
    return [case for case in chain.from_iterable(zip_longest(*families)) if case is not None]


def _family(family: str, seed: int) -> Iterator[Case]:
    count, templates = FAMILIES[family]
    for number in range(count):
        template = templates[number % len(templates)]
        name = f"{template.__name__} {number}, seed {seed}"
        yield Case(name, family, template(random.Random(name)))
