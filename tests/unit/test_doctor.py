"""headrank doctor: it finds what is wrong, says how to mend it, shows no secret, and needs no torch for files and
packages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrank import HeadSet
from headrank.commands import main
from headrank.doctor.environment import look_at_environment, shown_value
from headrank.doctor.finding import Finding, as_lines, split_error
from headrank.doctor.installation import look_at_installation
from headrank.doctor.machine import look_at_machine
from headrank.doctor.model_files import look_at_model
from headrank.files import write_json

ROOT = Path(__file__).resolve().parents[2]


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "problem"]


@pytest.fixture
def exported(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model with the headrank.json of an export."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), folder)
    heads = HeadSet(((1, 2), (2, 7)), "core", "tiny", 4, 8).to_dict()
    write_json(
        folder / "headrank.json", {"format": "headrank/1", "heads": heads, "is_truncated": False, "training": {}}
    )
    return folder


def test_files_and_packages_are_looked_at_without_torch(exported: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from headrank.commands import main; "
        f"sys.exit(main(['doctor', '--model', {str(exported)!r}, '--part', 'model', '--part', 'installation', "
        "'--part', 'environment']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 heads by core, sequential layout; layers 0-2 of 4 are computed" in done.stdout


def test_a_torch_that_cannot_be_imported_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = look_at_machine()
    assert (
        found.status == "problem" and "torch cannot be imported" in found.says and "pip install torch" in found.remedy
    )


def test_a_sound_model_has_no_problem_and_really_ranks(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(exported), "--part", "model", "--part", "machine", "--try", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == 0
    facts = {key: value for finding in report["findings"] for key, value in finding.get("facts", {}).items()}
    assert facts["device"] == "cpu" and facts["dtype"] == "float32" and facts["layers_used"] == 3
    assert sorted(facts["order"]) == [0, 1, 2]


def test_a_problem_gives_exit_code_1_and_its_remedy_below(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (exported / "headrank.json").unlink()
    assert main(["doctor", "--model", str(exported), "--part", "model"]) == 1
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if "no headrank.json" in line)
    assert lines[place].strip().startswith("problem") and "-> give --heads FILE" in lines[place + 1]
    assert lines[-1] == "1 problem found"


def test_heads_of_another_model_are_named(exported: Path, tmp_path: Path) -> None:
    HeadSet(((11, 2),), "core", "big", 28, 16).save(tmp_path / "heads.json")
    (found,) = problems(look_at_model(str(exported), str(tmp_path / "heads.json")))
    assert "28 layers of 16 heads, this one has 4 of 8" in found.says and "select-heads" in found.remedy


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def too_few_embeddings(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"vocab_size": 100})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_weights, "its header says"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs"),
            "is not a safetensors file",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (too_few_embeddings, "they are not of one model"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a decoder's configuration"),
        (lambda folder: (folder / "headrank.json").write_text("[]"), "not an export's description"),
        (lambda folder: write_json(folder / "headrank.json", {"heads": {"heads": []}}), "holds no heads"),
    ],
)
def test_each_damaged_file_is_one_problem_with_a_remedy(
    exported: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(exported)
    (found,) = problems(look_at_model(str(exported)))
    assert says in found.says and found.remedy


def test_a_folder_that_is_not_there_and_a_hub_name_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = problems(look_at_model(str(tmp_path / "nothing")))
    assert "no such folder" in found.says
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (found,) = problems(look_at_model("nobody/no-such-model-of-ours"))
    assert "HF_HUB_OFFLINE" in found.says and "hf download nobody/no-such-model-of-ours" in found.remedy


def test_an_empty_cache_is_a_note_for_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path))
    (found,) = look_at_model("embedded", "all")
    assert found.status == "note" and "first use" in found.says


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abcdefgh12345678", "(set, not shown)"),
        ("HEADRANK_API_KEY", "x", "(set, not shown)"),
        ("HEADRANK_API_KEY", "", "(empty)"),
        ("HTTPS_PROXY", "http://user:pass@proxy:3128", "http://(not shown)@proxy:3128"),
        ("HEADRANK_NOTE", "it is hf_abcdefgh12345678 indeed", "it is (not shown) indeed"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
    ],
)
def test_secrets_are_not_shown(name: str, value: str, shown: str) -> None:
    assert shown_value(name, value) == shown


def test_only_variables_that_matter_are_listed_and_a_wrong_one_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRANK_LOG", "LOUD")
    found = look_at_environment(
        {"HEADRANK_LOG": "LOUD", "AWS_SECRET_ACCESS_KEY": "s3cret", "EDITOR": "vi", "HF_TOKEN": "hf_12345678901"}
    )
    text = "\n".join(as_lines(found))
    assert "HEADRANK_LOG=LOUD" in text and "EDITOR" not in text and "s3cret" not in text and "hf_1" not in text
    assert any("is not a level" in finding.says for finding in problems(found))


def test_a_cache_that_cannot_be_made_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "file" / "cache"))
    assert any(
        "cannot be written" in finding.says and "HEADRANK_CACHE" in finding.remedy
        for finding in problems(look_at_environment({}))
    )


def test_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    found = look_at_environment({"HF_HOME": "/home/someone/models"})
    assert found[0].says == "HF_HOME=~/models"


def test_an_old_or_missing_package_is_a_problem_and_an_extra_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrank.doctor import installation

    versions = {"transformers": "4.40.0", "bm25s": None, "megatron-core": None}
    real = installation.installed_version
    monkeypatch.setattr(
        installation, "installed_version", lambda name: versions[name] if name in versions else real(name)
    )
    found = look_at_installation()
    if any("not installed" in finding.says and "headrank" in finding.says for finding in found):
        pytest.skip("headrank itself is not installed here, so its requirements are not known")
    text = "\n".join(as_lines(problems(found)))
    assert (
        "transformers 4.40.0 is installed" in text and "bm25s is not installed" in text and "pip install 'bm25s" in text
    )
    assert "megatron-core" not in text
    assert any(finding.status == "note" and "megatron-core" in finding.says for finding in found)


def test_a_wrong_device_is_a_problem_with_its_remedy() -> None:
    (found,) = look_at_machine("cuda:7")
    assert "CUDA devices" in found.says and "cpu" in found.remedy


def test_more_threads_than_cores_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrank import placement

    monkeypatch.setattr(placement, "available_cores", lambda: 0)
    assert any("more threads" in finding.says for finding in problems(look_at_machine("cpu")))


def test_a_failing_trial_is_a_problem_not_a_traceback(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_weights(exported)
    assert main(["doctor", "--model", str(exported), "--part", "environment", "--try"]) == 1
    out = capsys.readouterr().out
    assert "cannot be read" in out and "Traceback" not in out


def test_the_remedy_is_what_follows_the_last_semicolon() -> None:
    assert split_error("a.json:3: x; y; give z") == ("a.json:3: x; y", "give z")
    assert split_error("nothing to split")[0] == "nothing to split"


def test_a_store_for_heads_that_read_lists_is_a_problem(exported: Path, tmp_path: Path) -> None:
    from headrank.doctor.trial import try_reranking

    (found,) = problems(try_reranking(str(exported), None, None, None, str(tmp_path)))
    assert "late layout" in found.says and found.remedy


def test_an_adapter_is_looked_at_together_with_its_base(exported: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.move(exported / "headrank.json", adapter / "headrank.json")
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(exported), "peft_type": "LORA"})
    found = look_at_model(str(adapter))
    assert not problems(found) and any("a PEFT adapter on" in finding.says for finding in found)
    assert any("2 heads by core" in finding.says for finding in found)
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(tmp_path / "gone")})
    (missing,) = problems(look_at_model(str(adapter)))
    assert "gone" in missing.says and missing.remedy
