"""The source distribution, its metadata, the citation and the issue forms."""

import email
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dltrain_ext

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SHIPPED = ["benchmarks", "csrc", "docs", "dltrain_ext", "examples", "python_tests"]
BUILT = {".so", ".o", ".pyc"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Make the source distribution without torch, in a checkout that has been built in place."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.so"))
    for name in ("_C.cpython-311-x86_64-linux-gnu.so", "_build_info.py", "__pycache__/info.cpython-311.pyc"):
        (copy / "dltrain_ext" / name).parent.mkdir(exist_ok=True)
        (copy / "dltrain_ext" / name).write_text("")
    hidden = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '-q', 'sdist']"
    command = [sys.executable, "-c", f"__file__ = 'setup.py'; {hidden}; exec(open('setup.py').read())"]
    done = subprocess.run(command, cwd=copy, env=os.environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (archive,) = (copy / "dist").iterdir()
    assert archive.name == f"dltrain_ext-{PROJECT['version']}.tar.gz"
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder / "unpacked"], check=True)  # shutil's filter is from 3.11.4 on
    (found,) = (folder / "unpacked").iterdir()
    return found


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_source_distribution_contains_all_tracked_files_of_its_folders(unpacked):
    tracked = subprocess.run(["git", "ls-files", "--", *SHIPPED], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs a git checkout")
    assert set(tracked.stdout.split()) <= files(unpacked)


def test_a_source_distribution_can_be_built_tested_and_cited(unpacked):
    needed = {"CITATION.cff", "CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "README.md"}
    assert {"pyproject.toml", "setup.py", "csrc/build.json", "python_tests/conftest.py", *needed} <= files(unpacked)


def test_a_source_distribution_contains_no_build_results(unpacked):
    found = files(unpacked)
    assert not [name for name in found if Path(name).suffix in BUILT]
    assert "dltrain_ext/_build_info.py" not in found


def test_metadata(unpacked):
    metadata = email.message_from_string((unpacked / "PKG-INFO").read_text())
    assert metadata["Name"] == PROJECT["name"] and metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    # Without extras it depends only on torch.
    plain = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
    assert [one.split(">")[0] for one in plain] == ["torch"]


def test_the_version_is_that_of_pyproject():
    assert dltrain_ext.__version__ == PROJECT["version"], "built before the version changed: build it again"
    assert "version" not in (ROOT / "setup.py").read_text().split("setup(**")[1]


def test_the_citation_has_this_version():
    """The keys are those that the Citation File Format 1.2.0 requires for software."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors"}
    known = {"type", "abstract", "version", "license", "keywords", "date-released", "repository-code", "url", "doi"}
    assert required <= citation.keys() <= required | known
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] == PROJECT["name"] and citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"] and citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["abstract"] == PROJECT["description"]


@pytest.mark.parametrize("path", sorted(set(FORMS.glob("*.yml")) - {FORMS / "config.yml"}), ids=lambda path: path.stem)
def test_a_form_is_valid(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "title", "labels", "body"}
    names = [element["id"] for element in form["body"]]
    assert len(names) == len(set(names))
    for element in form["body"]:
        assert element["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert element.keys() <= {"type", "id", "attributes", "validations"}
        assert element["attributes"]["label"] and isinstance(element["validations"]["required"], bool)
    assert any(element["validations"]["required"] for element in form["body"])


def test_a_bug_report_asks_for_the_output_of_info():
    form = yaml.safe_load((FORMS / "bug_report.yml").read_text())
    (asked,) = [one for one in form["body"] if "python -m dltrain_ext.info" in one["attributes"]["label"]]
    assert asked["validations"]["required"]


def test_the_settings_of_the_forms_exist():
    settings = yaml.safe_load((FORMS / "config.yml").read_text())
    assert settings.keys() <= {"blank_issues_enabled", "contact_links"}
    assert isinstance(settings["blank_issues_enabled"], bool)
