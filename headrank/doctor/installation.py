"""Which packages are installed, whether they are recent enough, which extras are complete, and known traps among
them.
"""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from headrank.doctor.finding import Finding, Findings


def look_at_installation() -> list[Finding]:
    """Python, headrank itself, the packages it needs, its extras."""
    findings = Findings("installation")
    findings.ok(
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )
    requirements = _declared(findings)
    for requirement in requirements.get("", []):
        _check_needed(findings, requirement)
    for extra, of_extra in sorted(requirements.items()):
        if extra:
            _check_extra(findings, extra, of_extra)
    _check_traps(findings)
    return findings.found


def _declared(findings: Findings) -> dict[str, list[Requirement]]:
    """What headrank's metadata ask for, by extra ("" is the core); reported when they cannot be found."""
    import headrank

    here = Path(headrank.__file__).parent.parent
    try:
        distribution = metadata.distribution("headrank")
    except metadata.PackageNotFoundError:
        findings.problem(f"headrank runs from {here}, which is not installed", f"run pip install -e '{here}'")
        return {}
    if distribution.version != headrank.__version__:
        findings.problem(
            f"headrank {headrank.__version__} is imported from {here}, but version {distribution.version} is installed",
            "unset PYTHONPATH, or install this version with pip install -e .",
        )
    else:
        findings.ok(f"headrank {headrank.__version__} from {here}", headrank=headrank.__version__)
    _check_python(findings, distribution.metadata["Requires-Python"] or "")
    requirements: dict[str, list[Requirement]] = defaultdict(list)
    extras = ["", *distribution.metadata.get_all("Provides-Extra", [])]
    for line in distribution.requires or []:
        requirement = Requirement(line)
        for extra in extras:
            # markers speak of Python versions too: what this interpreter does not need is not missing
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if applies and (not extra or "extra ==" in line):
                requirements[extra].append(requirement)
    return requirements


def _check_python(findings: Findings, supported: str) -> None:
    from packaging.specifiers import SpecifierSet

    if supported and not SpecifierSet(supported).contains(platform.python_version()):
        findings.problem(
            f"python {platform.python_version()} is not supported", f"make an environment with Python {supported}"
        )


def installed_version(name: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # a build of one's own knows what it does


def _check_needed(findings: Findings, requirement: Requirement) -> None:
    """One package that headrank cannot do without."""
    version, wanted = installed_version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if version is None:
        findings.problem(f"{requirement.name} is not installed", f"run pip install '{wanted}'")
    elif not _fits(requirement, version):
        findings.problem(
            f"{requirement.name} {version} is installed, headrank needs {wanted}", f"run pip install '{wanted}'"
        )
    else:
        findings.ok(f"{requirement.name} {version}", **{requirement.name: version})


def _check_extra(findings: Findings, extra: str, requirements: list[Requirement]) -> None:
    """An extra may be missing; only one that is there and too old is a problem."""
    versions = {requirement: installed_version(requirement.name) for requirement in requirements}
    missing = [requirement.name for requirement, version in versions.items() if version is None]
    for requirement, version in versions.items():
        if version is not None and not _fits(requirement, version):
            wanted = f"{requirement.name}{requirement.specifier}"
            findings.problem(
                f"extra {extra!r}: {requirement.name} {version} is installed, it needs {wanted}",
                f"run pip install '{wanted}'",
            )
    if missing:
        findings.note(
            f"extra {extra!r} is not complete ({', '.join(missing)}); pip install 'headrank[{extra}]' would add it",
            missing=missing,
        )
    else:
        shown = ", ".join(f"{requirement.name} {version}" for requirement, version in versions.items())
        findings.ok(f"extra {extra!r}: {shown}")


def _check_traps(findings: Findings) -> None:
    """Packages that break others by being there."""
    if installed_version("transformer-engine") and not util.find_spec("transformer_engine_torch"):
        findings.problem(
            "transformer-engine is installed without its torch part, and 'import megatron.core' will fail",
            "run pip install --no-build-isolation 'headrank[gpu]', or pip uninstall transformer-engine",
        )
    # the package index has an unrelated "apex"; NVIDIA's brings the module amp_C
    apex = util.find_spec("apex")
    if apex is not None and not util.find_spec("amp_C"):
        findings.problem("the package 'apex' is not NVIDIA's apex", "run pip uninstall apex")
    if "site-packages" not in sys.prefix and sys.prefix == sys.base_prefix:
        findings.note("no virtual environment: packages of the system may change under headrank")
