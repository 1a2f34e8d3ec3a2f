"""Finds a machine's problems and their fixes: pure functions of an examination."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream.base.machine import CpuLoad
from slipstream.base.text import format_count, format_ms

GB = 1e9
SHM_BYTES = 1 * GB
"""Workers pass batches through shared memory; Docker's default is 64 MB"""
DISK_BYTES = 2 * GB
MEMORY_BYTES, MEMORY_SHARE = 1 * GB, 0.1
"""Free memory, in bytes and as a share of all, below which there is a problem"""
SWAPPED_BYTES = 0.5 * GB
"""A kernel swaps out less than this while nothing needs it."""
GPU_SHARE = 0.25
"""Share of a GPU's memory that should be free"""
BUSY_PERCENT = 20
"""Utilisation of a GPU before any trial from which on something else is using it"""
OLDEST_DRIVER = {13: "580", 12: "525"}
"""The oldest Linux driver for each major version of CUDA"""
WHEELS = {13: "cu130", 12: "cu126"}
"""The builds of torch for a driver, by the major version of CUDA that it supports"""
OLD_GPUS = "cu126"
"""The build that still supports GPUs older than compute capability 7.5"""

SLOW_THREADS = 4.0
"""How many times the step of one thread may take with all of them: tiny steps gain nothing"""

Facts = dict[str, Any]


class Problem(NamedTuple):
    problem: str
    fix: str


def find_problems(examination: Facts) -> list[dict[str, str]]:
    """Find all problems in `machine` and `techniques`, the results of `examine`."""
    machine = examination["machine"]
    rules = (_check_visible, _check_capability, _check_gpu_load, _check_cores, _check_memory)
    problems = [problem for rule in (*rules, _check_tools) for problem in rule(machine)]
    problems += _check_techniques(machine, examination["techniques"])
    return [problem._asdict() for problem in problems]


def _check_visible(machine: Facts) -> Iterator[Problem]:
    """Report an NVIDIA GPU that torch does not see."""
    driver, cuda, signs = machine["driver"], machine["cuda"], machine["nvidia_signs"]
    if cuda["available"] or not (signs or machine["gpus"]):
        return
    name = machine["gpus"][0]["name"] if machine["gpus"] else "an NVIDIA GPU"
    hidden = machine["environment"]["CUDA_VISIBLE_DEVICES"]
    built_for, supported = _parse_major(cuda["built_for"]), _parse_major(driver["cuda"])
    if built_for is None:
        yield Problem(
            f"{name} is here, but torch {machine['torch']} is built without CUDA",
            _suggest_install(machine, WHEELS.get(supported or 13, "cu130")),
        )
    elif hidden is not None and hidden.strip() in ("", "-1"):
        why = f'{name} is here, but CUDA_VISIBLE_DEVICES = "{hidden}" hides it'
        yield Problem(why, "unset CUDA_VISIBLE_DEVICES")
    elif supported is not None and supported < built_for:
        update = f"update the driver to {OLDEST_DRIVER.get(built_for, 'the newest')} or later"
        wheel = WHEELS.get(supported)
        yield Problem(
            f"driver {driver['version']} goes up to CUDA {driver['cuda']}, torch is built for CUDA "
            f"{cuda['built_for']}",
            f"{update}, or: {_suggest_install(machine, wheel)}" if wheel else update,
        )
    elif driver["version"] is None:
        yield Problem(
            f"{name} is here, but no driver answers ({driver['error']})",
            "install NVIDIA's driver (on Ubuntu: sudo ubuntu-drivers install), restart the machine "
            "after an update of it; in a container: docker run --gpus all ...",
        )
    else:
        reason = f": {cuda['why']}" if cuda["why"] else ""
        yield Problem(
            f"{name} is here with driver {driver['version']}, but torch sees none{reason}",
            "restart the machine; in a container: docker run --gpus all ...",
        )


def _suggest_install(machine: Facts, wheel: str) -> str:
    index = f"https://download.pytorch.org/whl/{wheel}"
    return f'pip install --force-reinstall "{machine["torch_wanted"]}" --index-url {index}'


def _parse_major(version: str | None) -> int | None:
    return None if version is None else int(version.split(".")[0])


def _check_capability(machine: Facts) -> Iterator[Problem]:
    """Report a GPU for which torch has no code."""
    built = machine["cuda"]["architectures"]
    known = [int(name.split("_")[1].rstrip("af")) for name in built]
    for gpu in _list_visible(machine):
        major, minor = (int(part) for part in gpu["compute_capability"].split("."))
        if known and 10 * major + minor < min(known):
            yield Problem(
                f"{gpu['name']} has compute capability {major}.{minor}; torch {machine['torch']} "
                f"is built for {', '.join(built)}",
                _suggest_install(machine, OLD_GPUS),
            )


def _list_visible(machine: Facts) -> list[Facts]:
    return [gpu for gpu in machine["gpus"] if gpu["device"]]


def _check_gpu_load(machine: Facts) -> Iterator[Problem]:
    """Report heat, the power limit, and other processes on a GPU."""
    cards = _list_visible(machine)
    for gpu in cards:
        name = f"{gpu['device']} ({gpu['name']})"
        alternatives = [card["device"] for card in cards if card is not gpu]
        elsewhere = (
            f"; or take another GPU: --set engine.device={alternatives[0]}" if alternatives else ""
        )
        if "heat" in gpu["throttled"]:
            temperature = "" if gpu["temperature_c"] is None else f", {gpu['temperature_c']} °C,"
            yield Problem(
                f"{name} is too hot{temperature} and slows its clock",
                "give it air, or less power: sudo nvidia-smi -pl WATTS; watch it with: "
                "nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
            )
        if "power" in gpu["throttled"]:
            yield Problem(
                f"{name} is at its power limit and slows its clock",
                "look at the limit with: nvidia-smi -q -d POWER; raise it with: "
                "sudo nvidia-smi -pl WATTS",
            )
        for process in gpu["processes"]:
            owner = f"process {process['pid']}" + (
                f" ({process['name']})" if process["name"] else ""
            )
            used = process["memory_bytes"]
            activity = "is at work on" if used is None else f"holds {used / GB:.1f} GB of"
            yield Problem(
                f"{owner} {activity} {name}", f"kill {process['pid']}, if it is yours{elsewhere}"
            )
        if gpu["processes"]:
            continue
        if (gpu["busy_percent"] or 0) >= BUSY_PERCENT:
            yield Problem(
                f"{name} was {gpu['busy_percent']} % busy before anything ran here",
                f"nvidia-smi on the host tells who is at work{elsewhere}",
            )
        free = gpu["free_bytes"]
        if free is not None and free < GPU_SHARE * gpu["memory_bytes"]:
            yield Problem(
                f"{name} has {free / GB:.1f} of {gpu['memory_bytes'] / GB:.1f} GB free",
                f"nvidia-smi tells who holds the rest{elsewhere}",
            )
    if cards and machine["environment"]["CUDA_LAUNCH_BLOCKING"] == "1":
        why = "CUDA_LAUNCH_BLOCKING = 1 makes the host wait for every kernel"
        yield Problem(why, "unset CUDA_LAUNCH_BLOCKING")


def _check_cores(machine: Facts) -> Iterator[Problem]:
    """Report more threads than cores."""
    usable, quota = machine["cpu"]["usable"], machine["cpu"]["quota"]
    if quota is not None and quota < usable:
        yield Problem(
            f"{usable} cores are visible, but only {quota:g} cores' worth of time may be used",
            f"threads follow the quota; give the container more: docker run --cpus={usable}",
        )
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = (machine["environment"][name] or "").split(",")[0].strip()
        if first.isdigit() and int(first) > usable:
            cores = format_count(usable, "core")
            yield Problem(f"{name} = {first}, but {cores} can be used", f"unset {name}")
    load = machine["cpu"].get("load")
    if load and CpuLoad(**load).is_busy:
        yield Problem(
            f"the machine is busy: {CpuLoad(**load).describe()}",
            "see which: ps aux --sort=-%cpu | head; end them, or train with the cores that are "
            "left: --set engine.threads=1",
        )


def _check_memory(machine: Facts) -> Iterator[Problem]:
    memory, shm, disk = (machine[name] for name in ("memory", "shm", "disk"))
    available = memory["available_bytes"]
    total = memory["limit_bytes"] or memory["total_bytes"]
    most = "ps aux --sort=-rss | head"
    if available < max(MEMORY_BYTES, MEMORY_SHARE * total):
        yield Problem(
            f"memory is nearly full: {available / GB:.1f} of {total / GB:.1f} GB available",
            f"see who holds it: {most}",
        )
    if memory["swap_used_bytes"] > SWAPPED_BYTES:
        yield Problem(
            f"{memory['swap_used_bytes'] / GB:.1f} GB are swapped out: what needs them waits for "
            "the disk",
            f"see who holds the memory: {most}; then: sudo swapoff -a && sudo swapon -a",
        )
    if shm is not None and shm["free_bytes"] < SHM_BYTES:
        yield Problem(
            f"/dev/shm has {shm['free_bytes'] / GB:.2g} GB free: DataLoader workers pass their "
            "batches through it and die when it is full",
            "docker run --shm-size=2g ..., or --set engine.workers=0",
        )
    if disk is not None and disk["free_bytes"] < DISK_BYTES:
        yield Problem(
            f"the disk is nearly full: {disk['free_bytes'] / GB:.1f} GB free in this folder",
            "make room, or write elsewhere: --set out=FOLDER",
        )


def _check_tools(machine: Facts) -> Iterator[Problem]:
    if machine["cuda"]["available"] and machine["triton"] is None:
        why = "Triton is not installed: torch.compile needs it on CUDA"
        yield Problem(why, "pip install triton")
    if machine["compiler"] is None:
        yield Problem(
            "there is no C++ compiler: torch.compile needs one",
            "sudo apt install g++, or name one: export CXX=clang++",
        )


def _check_techniques(machine: Facts, techniques: list[Facts]) -> Iterator[Problem]:
    """Report techniques that failed, unless a missing tool explains it."""
    known = {"torch.compile", "Triton kernel"}
    tools = machine["compiler"] and (machine["triton"] or not machine["cuda"]["available"])
    for technique in techniques:
        if technique.get("alternative_ms"):
            yield from _check_threads(machine, technique)
        if technique["works"] is not False or (technique["name"] in known and not tools):
            continue
        fix = technique["fix"]
        if "Python.h" in technique["why"]:
            fix = f"sudo apt install python3-dev, or {fix}"
        yield Problem(f"{technique['name']} does not work: {technique['why']}", fix)


def _check_threads(machine: Facts, technique: Facts) -> Iterator[Problem]:
    """Report threads that are far slower than a single one."""
    ms, one_ms = technique["ms"], technique["alternative_ms"]
    if ms <= SLOW_THREADS * one_ms:
        return
    threads = format_count(machine["cpu"]["usable"], "thread")
    yield Problem(
        f"a step takes {format_ms(ms)} with {threads} and {format_ms(one_ms)} with one: threads "
        "wait for cores that other processes, or a quota, take from them",
        "leave the number to the plan, which times one thread first, or: --set engine.threads=1; "
        "for other programs: export OMP_NUM_THREADS=1",
    )
