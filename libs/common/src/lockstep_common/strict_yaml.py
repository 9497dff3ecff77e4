"""Reads YAML in which no mapping has a key twice. PyYAML takes the last of several without a word."""

from typing import Any

import yaml

# The loader in C is twenty times as fast: another one would hold the interpreter's lock for seconds.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DuplicateKeyError(yaml.MarkedYAMLError):
    """A mapping has a key twice; its mark is where the second one is."""


def load_yaml(content: str | bytes) -> Any:
    """The value of a document; None if it is empty. Keys that `<<` brings may be given again: YAML means that.

    Raises:
        DuplicateKeyError: a mapping has a key twice.
        yaml.YAMLError: it is not YAML. The constructors of the library also raise, for example, KeyError and ValueError
            for values that do not fit their tags.
    """
    loader = _Loader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root)  # before `<<` is resolved, which puts all keys into one list
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check(root: yaml.Node) -> None:
    left, seen = [root], {id(root)}
    while left:
        node = left.pop()
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            children = [child for entry in node.value for child in entry]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        for child in children:
            if id(child) not in seen:  # an alias is the node that it names
                seen.add(id(child))
                left.append(child)


def _check_keys(node: yaml.MappingNode) -> None:
    names = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = (key.tag, key.value)
            if name in names:
                raise DuplicateKeyError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            names.add(name)
