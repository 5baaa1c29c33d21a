"""The configurations beside a checkpoint: where they stand, and which dialect reads each of them."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from microfloat.checkpoint.families import DIALECTS, Announcement, Read
from microfloat.checkpoint.records import Finding
from microfloat.errors import kind_of

_CONFIG = "config.json"
FILES = (_CONFIG, *(dialect.document[0] for dialect in DIALECTS if dialect.document))
_KEYS = ("quantization_config", "compression_config")
_INNER = re.compile(r"(^|_)(text|llm|language|language_model|thinker|decoder|model)_config$")
_DEPTH = 3


def announced(configs: Mapping[str, Any]) -> list[Announcement]:
    """The announcements of config.json, of the models inside it, and of the files of single dialects, in this order."""
    return [read(place, value) for place, _, value, read in _described(configs) if isinstance(value, dict) and value]


def misread(configs: Mapping[str, Any]) -> list[Finding]:
    """A warning for each description of a quantization that is no object, so that nothing of it is read."""
    return [
        Finding("config-disagrees", "warn", place, f"{key} is {kind_of(value)}, needed an object; it is not read.")
        for place, key, value, _ in _described(configs) if value is not None and not isinstance(value, dict)
    ]  # fmt: skip


def has_cache(configs: Mapping[str, Any]) -> bool:
    """True where the configurations speak of scales for the KV cache."""
    found = [value for _, _, value, _ in _described(configs) if isinstance(value, dict)]
    return any(value.get("kv_cache_scheme") or value.get("kv_cache_quant_algo") for value in found)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model, and of the models inside it, without descriptions of a quantization."""
    return {
        key: without_quantization(value) if _INNER.search(key) and isinstance(value, dict) else value
        for key, value in config.items() if key not in _KEYS
    }  # fmt: skip


def _described(configs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Read]]:
    """The place, the key and the value of every description of a quantization, and the function that reads it."""
    stated = [(file, configs.get(file)) for file in (_CONFIG, "params.json")]
    for place, config in (one for file, found in stated for one in _places(file, found, _DEPTH)):
        yield from ((place, key, config[key], _announcement) for key in _KEYS if key in config)
    for dialect in DIALECTS:
        file, key = dialect.document or ("", "")
        second = configs.get(file)
        if dialect.read is not None and isinstance(second, dict) and key in second:
            value = second[key]
            value = {"producer": second.get("producer"), **value} if isinstance(value, dict) else value
            yield file, key, value, dialect.read


def _places(place: str, config: Any, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A configuration, and the configurations of the models inside it."""
    if not isinstance(config, dict) or not depth:
        return
    yield place, config
    for key, inner in config.items():
        if _INNER.search(key):
            yield from _places(f"{place} ({key})" if place == _CONFIG else place, inner, depth - 1)


def _announcement(file: str, config: dict[str, Any]) -> Announcement:
    """The announcement of the dialect that has this quant_method, or without one these entries; else a refusal."""
    method, producer = config.get("quant_method"), config.get("producer")
    producer = producer.get("name") if isinstance(producer, dict) else None
    name = str(method).lower().replace("_", "-")
    for dialect in DIALECTS:
        known = any(fnmatchcase(name, one.replace("_", "-")) for one in dialect.methods)
        if method is None:  # its entries, or its producer, tell
            known = producer in dialect.methods or any(entry in config for entry in dialect.entries)
        if known and dialect.read is not None:
            return dialect.read(file, config)
    if method is None:
        keys = ", ".join(repr(key[:40]) for key in list(config)[:8])
        refusal = f"a quantization without quant_method is not read where its entries are {keys}."
        return Announcement(file, "unknown", "no quant_method", refusal=refusal)
    shown = str(method)[:100]
    methods = ", ".join(repr(one) for dialect in DIALECTS for one in dialect.methods if "*" not in one)
    refusal = f"quant_method {shown!r} is not read; read are {methods}."
    return Announcement(file, shown, f"quant_method {shown!r}", refusal=refusal)
