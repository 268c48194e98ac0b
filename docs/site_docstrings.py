"""Docstrings as mkdocstrings shows them (an extension of griffe, see mkdocs.yml): formulas as code, and for a class without a
docstring that of its file, which describes it."""

from typing import Any

import griffe
from site_hook import as_markdown


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_class and obj.docstring is None and obj.parent and obj.parent.docstring:
            obj.docstring = griffe.Docstring(obj.parent.docstring.value, parent=obj)
        if obj.docstring and not obj.is_module:
            obj.docstring.value = as_markdown(obj.docstring.value)
