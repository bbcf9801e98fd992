"""The helper's file: the same bytes every time, everything inside that it imports, and clean for Python 3.9."""

from __future__ import annotations

import ast
import io
import zipfile

from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp

PREFIX = _zipapp.PACKAGE.replace("/", ".")


def archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(_zipapp.build()))


def test_the_same_sources_give_the_same_bytes_in_any_order():
    sources = {"b/c.py": b"1", "a.py": b"2"}
    assert _zipapp.pack(sources) == _zipapp.pack(dict(reversed(list(sources.items()))))
    assert _zipapp.pack(sources) != _zipapp.pack({**sources, "a.py": b"3"})


def test_every_import_of_the_collection_is_inside():
    names = set(archive().namelist())
    wanted = set()
    for name in names:
        if not name.startswith(_zipapp.PACKAGE) and name != "__main__.py":
            continue
        for node in ast.walk(ast.parse(archive().read(name))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ansible"):
                base = node.module.replace(".", "/")
                for alias in node.names:
                    as_module = f"{base}/{alias.name}.py"
                    wanted.add(as_module if as_module in names else f"{base}.py")
    assert wanted, "the test found no import at all"
    assert wanted <= names


def test_the_sources_are_clean_for_python_39():
    for name in archive().namelist():
        if name.endswith(".py"):
            ast.parse(archive().read(name), filename=name, feature_version=(3, 9))


def test_no_path_or_time_of_the_builder_is_inside():
    for info in archive().infolist():
        assert info.date_time == (1980, 1, 1, 0, 0, 0)
        assert info.compress_type == zipfile.ZIP_STORED
        assert not info.filename.startswith("/")
