"""Connects to the running Ray cluster, with a token where it asks for one, and says why it fails.

A plain `ray start --head` asks for a token if there is one on its machine, which any earlier
`ray.init()` leaves there (Ray 2.60). Ray's client then offers it to a cluster that it found by
itself, but to none of RAY_ADDRESS, and also to one without tokens, whose workers cannot answer a
client that expects them. So the cluster is asked first, by Ray's own health check.
"""

import importlib
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from slipstream.clusters.resources import Node
from slipstream.errors import UserError

ADDRESS, AUTH_MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
"""Environment variables of Ray"""
ANSWER_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
HEALTH_CHECK = ("-m", "ray.scripts.scripts", "health-check")
START = "start one with `ray start --head`"


def connect() -> Any:
    """Return the module `ray`, connected to the running cluster."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "--on ray: Ray is not installed; install it with: pip install 'slipstream[ray]'"
        )
    if "ray" in sys.modules and importlib.import_module("ray").is_initialized():
        return importlib.import_module("ray")
    address = os.environ.get(ADDRESS, "")
    _check_address(address)
    if address != "local":  # with which Ray starts a cluster of its own
        _set_auth_mode(_find_auth_mode(address))
    ray = importlib.import_module("ray")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--on ray: {_name_cluster(address)} does not accept this machine ({reason}); the "
            "command has to run on a node of the cluster, with its version of Ray and Python"
        ) from None
    return ray


def list_nodes() -> list[Node]:
    """List the nodes that are alive."""
    alive = [node for node in connect().nodes() if node["Alive"]]
    return [
        Node(
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]


def _check_address(address: str) -> None:
    """Raise a UserError unless RAY_ADDRESS is empty, of Ray's own words or where someone listens.

    Ray itself tries for many minutes.
    """
    if address in ("", "auto", "local"):
        return
    match = re.fullmatch(r"\[?([^/]+?)\]?:(\d+)", address)
    if match is None:
        raise UserError(
            f"--on ray: {ADDRESS}={address}: expected HOST:PORT of the cluster's head node, 6379 "
            "by default, as `ray start --head` prints it; a client from outside the cluster "
            "(ray://) and the dashboard (http://) are not supported"
        )
    try:
        socket.create_connection((match[1], int(match[2])), ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--on ray: no Ray cluster answers at {ADDRESS}={address} ({error}); {START}, or "
            f"correct or unset {ADDRESS}"
        ) from None


def _find_auth_mode(address: str) -> str:
    """Return the value of RAY_AUTH_MODE with which the cluster accepts this machine.

    Raise a UserError if there is none, or no cluster.
    """
    requested = os.environ.get(AUTH_MODE)
    token = _find_token()
    if requested == "token" and token is None:
        raise UserError(
            f"--on ray: {AUTH_MODE}=token, but this machine has no token; {_explain_token()}"
        )
    modes = [requested] if requested else ["disabled", "token"]
    for mode in modes if token else modes[:1]:
        problem = _check_health(mode)
        if problem is None:
            return mode
        if "AuthenticationError" not in problem:
            raise UserError(_describe_problem(address, problem))
    refused = f"--on ray: {_name_cluster(address)}"
    if token is None:
        raise UserError(
            f"{refused} asks for a token, and this machine has none; {_explain_token()}"
        )
    if requested and requested != "token":
        raise UserError(f"{refused} asks for a token, but {AUTH_MODE}={requested}; unset it")
    raise UserError(f"{refused} refuses the token in {token}; {_explain_token()}")


def _check_health(mode: str) -> str | None:
    """Return None if the cluster accepts this machine with this RAY_AUTH_MODE, else Ray's error.

    Another process asks: Ray reads the mode once, and its warnings would be on the screen.
    """
    command, env = [sys.executable, *HEALTH_CHECK], os.environ | {AUTH_MODE: mode}
    try:
        checked = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"TimeoutExpired: no answer within {CHECK_TIMEOUT_S:.0f} s"
    return checked.stderr if checked.returncode else None


def _describe_problem(address: str, problem: str) -> str:
    """Return a message for the error of the health check."""
    errors = re.findall(r"^([\w.]+): (.+)$", problem, re.MULTILINE)
    kind, reason = errors[-1] if errors else ("", problem.strip() or "no reason")
    if kind == "ConnectionError":  # it found none
        return f"--on ray: no Ray cluster runs on this machine; {START}, or name one with {ADDRESS}"
    name = _name_cluster(address)
    return f"--on ray: {name} does not answer as expected: {reason.strip()}; see `ray status`"


def _set_auth_mode(mode: str) -> None:
    """Set RAY_AUTH_MODE for this process and its children, as Ray does when it finds a token."""
    if os.environ.get(AUTH_MODE) == mode:
        return
    os.environ[AUTH_MODE] = mode
    if "ray" in sys.modules:  # it has read the variable already
        importlib.import_module("ray._raylet").Config.initialize("")


def _find_token() -> str | None:
    """Return where this machine's token is, in the order in which Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    return path if Path(path).exists() else None


def _explain_token() -> str:
    return (
        "set RAY_AUTH_TOKEN to what `ray get-auth-token` prints on the head node, or copy "
        "~/.ray/auth_token from there"
    )


def _name_cluster(address: str) -> str:
    return f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"
