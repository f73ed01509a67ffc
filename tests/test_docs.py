"""The documentation's examples run, and README tells the truth about the tree."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import normgeo

ROOT = Path(__file__).parent.parent
MODULES = sorted(m.name for m in pkgutil.iter_modules(normgeo.__path__) if m.name != "__main__")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"normgeo.{name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_readme_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_public_name_is_there_and_documented():
    for name in normgeo.__all__:
        assert getattr(normgeo, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = normgeo.nothing


def test_readme_shows_the_tree():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("## The tree") :]
    for folder, pattern in (("normgeo", "*.py"), ("analyses", "*.py"), ("notebooks", "*.ipynb")):
        for path in (ROOT / folder).glob(pattern):
            if not path.name.startswith("_"):
                assert re.search(rf"\b{re.escape(path.name)}\b", tree), f"{path} is not in README's tree"
    for name in re.findall(r"^    (\w+\.py) ", tree, re.MULTILINE):
        assert list(ROOT.glob(f"*/{name}")), f"README's tree names {name}, which is not there"


def test_modules_stay_short():
    for path in [*ROOT.glob("normgeo/*.py"), *ROOT.glob("analyses/*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path
