"""A run's configuration as a YAML file: flat keys, or keys grouped under the schema's section names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, from_file, suggestion


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice is an error and not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"key {twice[0]} stands twice, near line {node.start_mark.line + 1}; keep one")
        return super().construct_mapping(node, deep=deep)


def read(path: str) -> dict[str, Any]:
    """The file's settings as a flat dict, field name -> value of the field's type.

    A key may be written with `-` or `_`. Under a section's name only that section's keys are allowed.

    Raises:
        ConfigError: if the file cannot be read, is no YAML mapping, or holds an unknown key, a key twice or a value of
            the wrong type; the message names file and key.
    """
    try:
        with Path(path).open(encoding="utf-8") as stream:
            document = yaml.load(stream, Loader=_Loader)  # _Loader is a SafeLoader
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: holds no mapping; write lines like `num_layers: 4`")
    flat: dict[str, Any] = {}
    for key, value in document.items():
        # `optimizer` is a section and also a field; only a mapping can be a section.
        if isinstance(value, dict) and key in schema.sections():
            for inner, inner_value in value.items():
                _put(flat, inner, inner_value, path, section=str(key))
        else:
            _put(flat, key, value, path, section=None)
    return flat


def _put(flat: dict[str, Any], key: Any, value: Any, path: str, section: str | None) -> None:
    name = str(key).replace("-", "_")
    where = f"--config {path}: {key if section is None else f'{section}.{key}'}"
    fields = {f.spelling or f.name: f for f in all_fields().values()} | all_fields()
    if name not in fields:
        known = list(fields) + list(schema.sections())
        raise ConfigError(f"{where}: unknown key{suggestion(name, known)}")
    field = fields[name]
    if section is not None and field.section != section:
        raise ConfigError(f"{where}: belongs to section {field.section}; move it there, or to the top level")
    if field.name in flat:
        raise ConfigError(f"{where}: is set twice, at the top level and under {field.section}; keep one")
    flat[field.name] = from_file(field, value, where)
