"""Settings from YAML: where each came from, unknown keys refused with the nearest name, ``a.b=c`` on the command line.

A document is read with the line of every key, so that whatever is wrong with a value is said with its file, line and key.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from valuepath.equations import nearest

Key = tuple[str | int, ...]


class Settings(BaseModel):
    """A section of settings: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Section = TypeVar("Section", bound=Settings)


def dotted(key: Key) -> str:
    """``model.layers[2]`` for ("model", "layers", 2)."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass
class Document:
    """Nested settings with the place that each key was given at.

    Attributes:
        data: what the YAML says.
        places: key path -> ``recipe.yaml, line 3`` or ``--set model.hidden_size=64``.
        name: of the document as a whole.
    """

    data: dict[str, Any]
    name: str
    places: dict[Key, str] = field(default_factory=dict)

    def place(self, key: Key) -> str:
        """Where the key, or the first one in it, or the nearest section around it, was given."""
        within = next((place for path, place in self.places.items() if path[: len(key)] == key), None) if key else None
        if within is not None:
            return within
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
        return self.name

    def error(self, key: Key, message: str) -> ValueError:
        """``recipe.yaml, line 3: model.hidden_size: expected ...``."""
        return ValueError(f"{self.place(key)}: {dotted(key)}: {message}" if key else f"{self.name}: {message}")

    def section(self, *key: str) -> Document:
        """The mapping at a key, with the places below it. An empty one if the key is absent or empty."""
        at: Any = self.data
        for part in key:
            at = at.get(part) if isinstance(at, dict) else None
        if at is None:
            at = {}
        if not isinstance(at, dict):
            raise self.error(key, f"expected keys and values, not {at!r}")
        below = {path[len(key) :]: place for path, place in self.places.items() if path[: len(key)] == key}
        return Document(at, self.place(key), below)

    def with_value(self, path: str, value: Any, place: str) -> Document:
        """A copy with the dotted key set, sections on the way made where they are missing.

        Raises:
            ValueError: if the path is empty or runs through something that is no section.
        """
        parts = path.split(".")
        if not all(parts):
            raise ValueError(f"{place}: {path!r} is no dotted key; expected e.g. optimiser.lr")
        changed = Document(copy.deepcopy(self.data), self.name, dict(self.places))
        at = changed.data
        for depth, part in enumerate(parts[:-1]):
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
            if not isinstance(at, dict):
                raise ValueError(f"{place}: {'.'.join(parts[: depth + 1])} is {at!r}, which has no keys")
        at[parts[-1]] = copy.deepcopy(value)
        stale = [key for key in changed.places if key[: len(parts)] == tuple(parts)]
        for key in stale:
            del changed.places[key]
        changed.places[tuple(parts)] = place
        return changed

    def with_overrides(self, pairs: Mapping[str, Any]) -> Document:
        """``--set`` pairs, already taken apart."""
        document = self
        for path, value in pairs.items():
            document = document.with_value(path, value, f"--set {path}={value}")
        return document

    def check(self, kind: type[Section]) -> Section:
        """The document as a validated object.

        Raises:
            ValueError: with file, line and key, and the nearest name for an unknown key.
        """
        try:
            return kind.model_validate(self.data)
        except ValidationError as wrong:
            first = min(wrong.errors(), key=lambda error: error["type"] != "extra_forbidden")
            key = tuple(first["loc"])
            where = self.place(key)
            shown = dotted(key)
            head = f"{where}: {shown}: " if shown else f"{where}: "
            if first["type"] == "extra_forbidden":
                known = _keys_at(kind, key[:-1])
                meant = nearest(str(key[-1]), known)
                raise ValueError(f"{head}unknown key{meant}; expected one of {', '.join(known)}") from None
            if first["type"] == "missing":
                raise ValueError(f"{head}is missing; {_about(kind, key)}") from None
            message = first["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            given = "" if first["type"] == "value_error" else f", not {first['input']!r}"
            raise ValueError(head + message + given) from None


def _model(annotation: Any) -> type[BaseModel] | None:
    """The settings class in an annotation such as ``A``, ``A | None``, ``list[A]`` or ``dict[str, A]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _model(inner))), None)


def _owner(kind: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The settings class that a key path leads to."""
    current: type[BaseModel] | None = kind
    for part in key:
        if current is None or not isinstance(part, str):
            continue
        if part in current.model_fields:
            current = _model(current.model_fields[part].annotation)
    return current


def _keys_at(kind: type[BaseModel], key: Key) -> list[str]:
    owner = _owner(kind, key)
    return list(owner.model_fields) if owner else []


def _about(kind: type[BaseModel], key: Key) -> str:
    owner = _owner(kind, key[:-1])
    description = owner.model_fields[str(key[-1])].description if owner and str(key[-1]) in owner.model_fields else None
    return description or "it has no default"


# ---------------------------------------------------------------------------------------------------------- reading
def read_yaml(path: Path | str) -> Document:
    """A YAML file of nested keys.

    Raises:
        ValueError: if it cannot be read, is no YAML, gives a key twice, or is not keys and values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as wrong:
        raise ValueError(f"{path}: cannot be read ({wrong.strerror or wrong}); expected a YAML file") from None
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{path}: byte {wrong.start} is not UTF-8; expected a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """As ``read_yaml``, from text; ``name`` stands for the file."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            places: dict[Key, str] = {}
            data = _built(node, (), places, name, loader) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{name}{at}: not YAML: {wrong.problem}") from None
    except yaml.YAMLError as wrong:
        raise ValueError(f"{name}: not YAML: {wrong}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name}: expected keys and values (such as `seed: 0`), found {type(data).__name__}")
    return Document(data, name, places)


def _built(node: yaml.Node, at: Key, places: dict[Key, str], name: str, loader: yaml.SafeLoader, depth: int = 0) -> Any:
    """A node's value; the line of each key is noted. Numbers such as 1e-3, text in YAML 1.1, are numbers."""
    if depth > 50 or len(places) > 100_000:  # an alias within itself, or aliases of aliases
        raise ValueError(f"{name}, line {node.start_mark.line + 1}: more than 50 levels or 100,000 values")
    if not isinstance(node, yaml.ScalarNode) and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        raise ValueError(f"{name}, line {node.start_mark.line + 1}: not YAML that is read here: {node.tag}")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise ValueError(f"{name}, line {line}: a key must be a word; merge keys (<<) are not covered")
            key = key_node.value
            if key in result:
                raise ValueError(f"{name}, line {line}: the key {key!r} is given twice; keep one")
            places[*at, key] = f"{name}, line {line}"
            result[key] = _built(value_node, (*at, key), places, name, loader, depth + 1)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for n, item in enumerate(node.value):
            places[*at, n] = f"{name}, line {item.start_mark.line + 1}"
            items.append(_built(item, (*at, n), places, name, loader, depth + 1))
        return items
    if isinstance(node, yaml.ScalarNode) and node.style is None and ":" in node.value:
        return node.value  # 1:5 is a slice here, not 65 in base 60; a date stays text too
    value = loader.construct_object(node)
    if isinstance(value, str) and isinstance(node, yaml.ScalarNode) and node.style is None:
        try:
            return float(value) if value[:1] in "+-.0123456789" and value.lower() not in (".nan", ".inf") else value
        except ValueError:
            return value
    return value


def yaml_value(text: str) -> Any:
    """One value as on the command line: ``1e-3``, ``[5, 6, 7]``, ``true``, ``1:5``, a word.

    Raises:
        ValueError: if it is no YAML.
    """
    text = text.strip()
    if ":" in text and text[0] not in "[{'\"":
        return text
    return parse_yaml(f"value: {text}", repr(text)).data["value"]


# ---------------------------------------------------------------------------------------------------------- writing
def as_yaml(data: Mapping[str, Any]) -> str:
    """YAML that reads back as the same data, keys in their order."""
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
