"""What a deployment with keys leaves open to somebody outside: ports, Ray's dashboard, logs, the time of its cache."""

from __future__ import annotations

import contextlib
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from scipy.stats import mannwhitneyu

from benchmarks.serve_process import ROOT, ServeProcess
from loadtest.prompts import sentences
from tests import limits
from tests.limits import patience_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KEYS = {"alice": "canary-key-of-alice-01", "bob": "canary-key-of-bob-0123"}
PROMPT, WRONG = "canary prompt four five six", "canary-wrong-key-0123"
LOOPBACK = ("127.", "::1")
# Ray's own, which ask for its token, the proxy's, which docs/security.md tells to close, and in actors of Ray's (ray::)
# the engine replicas' for channels, which ask for the cluster's secret.
MAY_LISTEN = ("gcs_server", "raylet", "ray::", "dashboard", "haproxy", "ray.serve.scripts", "monitor.py")
LOGS = (".log", ".out", ".err", ".json")
LOGS = (".log", ".out", ".err", ".json")
PAIRS = 200
PROMPT_WORDS = 700


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    keys = ",".join(f"{tenant}={key}" for tenant, key in KEYS.items())
    environ = {"MANTA_API_KEYS": keys, "RAY_AUTH_MODE": "token"}
    quickstart = ROOT / "configs/serve/quickstart.yaml"
    with ServeProcess(quickstart, ready_timeout_s=patience_s(), ends_gracefully=False, environ=environ) as process:
        yield process


def ask(server: ServeProcess, key: str, **body: Any) -> httpx.Response:
    body = {"model": "tiny-chat", "max_tokens": 1, "temperature": 0, **body}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.base_url}/v1/completions", json=body, headers=headers, timeout=patience_s())


def test_only_ray_listens_beyond_this_machine(server: ServeProcess) -> None:
    found = []
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(LOOPBACK):
                    found.append((title, connection.laddr))
    assert found, "Ray's own"
    strangers = [entry for entry in found if not any(name in entry[0] for name in MAY_LISTEN)]
    assert strangers == []
    assert not [entry for entry in found if entry[1].port == server.port], "the API's port"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/serve/applications/"),
        ("DELETE", "/api/serve/applications/"),
        ("PUT", "/api/serve/applications/"),
        ("POST", "/api/jobs/"),
        ("GET", "/api/jobs/"),
        ("GET", "/nodes?view=summary"),
        ("GET", "/logical/actors"),
        ("GET", "/worker/traceback?pid=1"),
        ("GET", "/worker/cpu_profile?pid=1"),
        ("GET", "/api/v0/logs/file?filename=../../etc/passwd"),
        ("GET", "/log_proxy?url=http://127.0.0.1:8265/"),
    ],
)
@pytest.mark.parametrize("origin", [None, "http://attacker.example"])
def test_the_dashboard_asks_for_ray_s_token(server: ServeProcess, method: str, path: str, origin: str | None) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"} if origin else {}
    request = urllib.request.Request(server.dashboard() + path, method=method, headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=patience_s())
    assert refused.value.code in (401, 403, 405), path
    assert server.health() == 200


@pytest.mark.parametrize("path", ["/static/js/../../../../../etc/passwd", "/static/..%2f..%2f..%2fetc%2fpasswd"])
def test_the_dashboard_gives_no_files(server: ServeProcess, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.dashboard() + path, timeout=patience_s())
    assert refused.value.code >= 400
    assert b"root:" not in refused.value.read()


def test_no_log_holds_keys_prompts_or_answers(server: ServeProcess) -> None:
    answer = ask(server, KEYS["alice"], prompt=PROMPT, max_tokens=20, ignore_eos=True).json()["choices"][0]["text"]
    assert len(answer) > 10
    assert ask(server, WRONG, prompt=PROMPT).status_code == 401
    assert ask(server, KEYS["bob"], prompt=PROMPT, stop=7).status_code == 400
    limits.pause(2.0)  # Ray writes its files a little later
    files = [path for path in server.tmp.rglob("*") if path.is_file() and path.suffix in LOGS]
    assert len(files) > 10
    texts = {path: path.read_bytes() for path in files}
    for secret in (*KEYS.values(), WRONG, PROMPT, answer):
        assert not [path.name for path, text in texts.items() if secret.encode() in text], secret


def test_the_time_of_an_answer_tells_nobody_what_others_asked(server: ServeProcess) -> None:
    """A prompt that Alice has asked takes Bob as long as one that nobody has, though it is quicker for her."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {"bob, alice's": [], "bob, nobody's": [], "alice, her own": []}
    for _ in range(PAIRS):
        hers, fresh = (f"{rng.random()} {sentences(rng, PROMPT_WORDS)}" for _ in range(2))
        ask(server, KEYS["alice"], prompt=hers)
        asked = [("bob, alice's", "bob", hers), ("bob, nobody's", "bob", fresh), ("alice, her own", "alice", hers)]
        rng.shuffle(asked)
        for name, tenant, prompt in asked:
            began = time.perf_counter()
            assert ask(server, KEYS[tenant], prompt=prompt).status_code == 200
            seconds[name].append(time.perf_counter() - began)
    hers, fresh, own = seconds.values()
    assert mannwhitneyu(own, fresh, alternative="less").pvalue < 1e-9, "the test would see it"
    assert mannwhitneyu(hers, fresh).pvalue > 1e-3
