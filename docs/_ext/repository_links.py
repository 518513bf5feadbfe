"""Links between the site and the repository.

A link to a file that is not a page leads to the file in the repository, a link to README.md leads to the first page, and a
link to an HTML file opens a copy of it on the site. Objects of the API reference link to their source lines.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>nsa_lab</title>
<meta http-equiv="refresh" content="0; url={page}">
<link rel="canonical" href="{page}">
<a href="{page}">Documentation of nsa_lab</a>
"""


def resolve_file_links(app: Sphinx, doctree: nodes.document) -> None:
    """Replace links to files and folders that are not pages."""
    folder = Path(app.env.doc2path(app.env.current_document.docname)).parent
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        if node.get("reftype") == "myst" and (target := find_target(app, node, folder)):
            path, anchor = target
            uri = find_file_uri(app, path, folder) + (f"#{anchor}" if anchor else "")
            node.replace_self(nodes.reference("", "", *node.children, internal=False, refuri=uri))


def find_target(app: Sphinx, node: nodes.Element, folder: Path) -> tuple[Path, str] | None:
    """Return the file or folder that is not a page, and the anchor in it; None for a link to a page or to nothing.

    MyST marks links to files as downloads, links to Markdown files as documents, and links to folders as unknown.
    """
    name, _, anchor = str(node["reftarget"]).partition("#")
    if node.get("refdomain") == "doc":
        path = ROOT / f"{name}.md"
        is_page = name in app.env.found_docs
        return None if is_page or not path.is_file() else (path, "")
    path = (folder / name).resolve()
    is_target = bool(name) and path.is_relative_to(ROOT) and (path.is_dir() or path.is_file())
    return (path, anchor) if is_target else None


def find_file_uri(app: Sphinx, path: Path, folder: Path) -> str:
    """Return the address of a file or folder, for a page in `folder`."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return os.path.relpath(ROOT / f"{app.config.root_doc}.html", folder)
    if path.suffix == ".html":
        copy = Path(app.outdir) / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        return os.path.relpath(path, folder)
    return f"{app.config.repository_url}/{'tree' if path.is_dir() else 'blob'}/{app.config.repository_branch}/{name}"


def find_source_url(repository_url: str, branch: str, module: str, name: str) -> str | None:
    """Return the address of the source lines of a Python object; None if it has none."""
    try:
        item: Any = importlib.import_module(module)
        for part in name.split("."):
            item = getattr(item, part)
        item = inspect.unwrap(item)
        path = Path(inspect.getsourcefile(item) or "").resolve().relative_to(ROOT)
        lines, first = inspect.getsourcelines(item)
    except (ImportError, AttributeError, TypeError, OSError, ValueError):
        return None
    return f"{repository_url}/blob/{branch}/{path.as_posix()}#L{first}-L{first + len(lines) - 1}"


def write_redirect(app: Sphinx, exception: Exception | None) -> None:
    """Write index.html, which a server looks for, with a redirect to the first page."""
    if not exception and app.builder.name == "html":
        page = f"{app.config.root_doc}.html"
        (Path(app.outdir) / "index.html").write_text(REDIRECT.format(page=page), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_url", "", "env")
    app.add_config_value("repository_branch", "main", "env")
    app.connect("doctree-read", resolve_file_links, priority=100)  # before Sphinx collects downloads
    app.connect("build-finished", write_redirect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
