"""What app/ imports is declared, whatever else brings it today."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement

from tests.rooms import FILES, ROOT, imports_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_ANOTHER = {"pydantic_core": "pydantic"}  # a part of it, of exactly one version


def declared(*extras: str) -> set[str]:
    """Names of the distributions that the project, or one of its extras, asks for."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {normal(Requirement(line).name) for lines in lists for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """Versions by the distribution's name that a file of constraints or requirements names."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", (ROOT / file).read_text(), re.M)
    return {normal(name): version for name, version in found}


def test_what_is_imported_is_declared() -> None:
    tops = {module.partition(".")[0] for path in FILES for module in imports_of(path)}
    foreign = sorted(tops - set(sys.stdlib_module_names) - {"app"})
    assert len(foreign) > 15
    bring, names = packages_distributions(), declared("audio", "gpu", "tokenizers", "tracing")
    homes = {module: OF_ANOTHER.get(module, module) for module in foreign}
    # What an extra brings may not be installed here; then it has the name of its module.
    brought = {module: {normal(each) for each in bring.get(home, [home])} for module, home in homes.items()}
    missing = {module for module, distributions in brought.items() if not distributions & names}
    assert missing - {"opentelemetry"} == set()  # whose API comes with its SDK


def test_every_pin_satisfies_what_is_declared() -> None:
    versions = {**pins("constraints.txt"), **pins("constraints-dev.txt")}
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = [Requirement(line) for lines in lists for line in lines]
    assert len(wanted) > 40
    for each in wanted:
        if normal(each.name) in versions:
            assert each.specifier.contains(versions[normal(each.name)].partition("+")[0]), str(each)


def test_a_model_on_a_cpu_answers_without_triton() -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from app import LLM, SamplingParams
        with LLM("tiny-chat", device="cpu") as llm:
            (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        print(len(output.outputs[0].token_ids))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["3"]), done.stderr


def test_constraints_of_development_are_apart() -> None:
    runtime, development = pins("constraints.txt"), pins("constraints-dev.txt")
    assert runtime.keys() & development.keys() == set()
    assert declared("audio", "tokenizers", "tracing") <= runtime.keys()
    assert {"pytest", "mypy", "locust", "openai"} <= development.keys()


def test_an_image_installs_the_same_versions_each_with_its_hash() -> None:
    text = (ROOT / "cluster/docker/requirements.txt").read_text()
    image, runtime = pins("cluster/docker/requirements.txt"), pins("constraints.txt")
    assert declared("audio", "tokenizers", "tracing") <= image.keys()
    assert {name: version for name, version in image.items() if runtime.get(name, version) != version} == {}
    assert {name for name in image.keys() - runtime.keys() if not name.startswith(("nvidia-", "cuda-"))} <= {
        "setuptools"
    }
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]
    assert len(entries) == len(image)
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
