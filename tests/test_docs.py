"""The documentation's examples run, and README tells the truth about the tree."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import normgeo
from analyses import efficiency

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("analyses/*.md"))]
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(normgeo.__path__, "normgeo.") if not re.search("__main__|triton", m.name)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_shapes_of_arrays_can_be_read():
    for module in map(importlib.import_module, MODULES):
        of_its_own = [it for it in vars(module).values() if getattr(it, "__module__", None) == module.__name__]
        methods = [it for kind in filter(inspect.isclass, of_its_own) for it in vars(kind).values()]
        for function in filter(inspect.isfunction, of_its_own + methods):
            if re.search(r"\[(Tensor|np\.ndarray), ", str(function.__annotations__)):
                get_type_hints(function)


@pytest.mark.parametrize("page", ["README.md", "analyses/conversion.md"])
def test_examples_of_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_met_in_readme():
    text = PAGES[0].read_text()
    assert all(f"({page.relative_to(ROOT)}" in text for page in PAGES[1:])


def test_every_public_name_is_there_and_documented():
    for name in normgeo.__all__:
        assert getattr(normgeo, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = normgeo.nothing


def test_readme_shows_the_tree():
    text = (ROOT / "README.md").read_text()
    block = text[text.index("## The tree") :].split("```")[1]
    shown, folder = set(), []
    for indent, name in re.findall(r"^( *)([\w./]+)", block, re.MULTILINE):
        folder = [*folder[: len(indent) // 4], name]
        shown.add("".join(folder))
    files = [path for top in ("normgeo", "analyses") for path in (ROOT / top).rglob("*.py")]
    files += (ROOT / "notebooks").glob("*.ipynb")
    there = {str(path.relative_to(ROOT)) for path in files if not path.name.startswith("_")}
    whole = tuple(
        name for name in shown if name.endswith("/") and not any(f.startswith(name) and f != name for f in shown)
    )
    named = {name for name in shown if name.endswith((".py", ".ipynb")) and not Path(name).name.startswith("_")}
    assert {name for name in there if not name.startswith(whole)} == named
    assert all((ROOT / name).exists() for name in shown)


def test_modules_stay_short():
    for path in [*ROOT.glob("normgeo/**/*.py"), *ROOT.glob("analyses/*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path


def test_modules_take_from_each_other_what_is_meant_for_others():
    """Whoever changes a module sees in its `__all__` what others rely on."""
    trees = {
        path: ast.parse(path.read_text()) for top in ("normgeo", "analyses") for path in ROOT.glob(f"{top}/**/*.py")
    }
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in trees}
    taken, checked = set(), 0
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("normgeo."):
                continue
            public = getattr(importlib.import_module(str(node.module)), "__all__", ())
            names = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules}
            checked += len(names)
            taken |= {f"{path.relative_to(ROOT)} takes {name} from {node.module}" for name in names - set(public)}
    assert checked > 500
    assert not taken


def test_inference_page_says_what_was_measured():
    page = " ".join((ROOT / "analyses/inference.md").read_text().split())
    large, inside, amx = (
        efficiency.compute(ROOT / f"analyses/data/efficiency_{name}.parquet")
        for name in ("large_h200", "norms_h200", "amx")
    )
    huge = large[(large.model == "vit-huge") & (large["mode"] == "graph") & (large.variant == "fused")]
    assert (
        "{:.2f} and {:.2f} of ViT Huge's time".format(*huge.set_index("dtype").ratio[["bfloat16", "autocast"]]) in page
    )
    norms = inside[inside.variant == "fused"].groupby("dtype").norm_ratio.median()
    assert "{:.2f} in float32, {:.2f} with int8 weights".format(*norms[["float32", "int8"]]) in page
    plain = amx[amx.variant.isin(["pre-rmsnorm", "pre-crmsnorm-padded"])]
    faster, slower = (plain.ratio_q75 < 1).sum(), (plain.ratio_q25 > 1).sum()
    assert f"quartiles in {faster} of {len(plain)} cases and slower in {slower}" in page
