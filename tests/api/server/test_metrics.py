"""/metrics: true numbers, a bounded number of series, names that dashboards ask for."""

from __future__ import annotations

import json
import math
import re
import threading
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.api.server.test_branches import Api
from tests.api.server.test_sse import send
from tests.api.serving import Serve, Serving, Steps, make_llm

DASHBOARD = Path(__file__).parents[3] / "examples/monitoring/grafana.json"


def scrape(server: Serving) -> dict[tuple[str, str], float]:
    """(name, labels) -> value."""
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_the_engines_numbers(serve: Serve) -> None:
    server = serve(make_llm(min_partial=1), max_pinned_ratio=0.5)
    api = Api(server)
    for _ in range(2):
        server.post("/v1/completions", {"prompt": "p" * 40, "max_tokens": 3})
    pinned = api.create(prompt="x" * 32, pin="hard")
    leased = api.create(prompt="y" * 48, lease={"ttl": 60})
    plain = api.create(prompt="z" * 16)["id"]
    api.do(plain, "fork", n=3)
    api.do(plain, "score", candidates=[{"text": "a"}, {"text": "b"}])
    seen = scrape(server)
    stats = server.llm.stats()
    assert seen["ramet_prompt_tokens_total", ""] == 80 + 32 + 48 + 16
    assert seen["ramet_prefix_tokens_total", "source=cached"] == 32
    assert seen["ramet_prefix_tokens_total", "source=computed"] == 80 + 96 - 32
    assert seen["ramet_generation_tokens_total", ""] == 6
    blocks = {label: value for (name, label), value in seen.items() if name == "ramet_kv_blocks"}
    assert (blocks["state=pinned"], blocks["state=leased"], blocks["state=active"]) == (2, 3, 1)
    assert sum(blocks.values()) == 256
    assert seen["ramet_branches", "state=idle"] == 6
    assert seen["ramet_trees", ""] == 3
    assert seen["ramet_forks_total", ""] == 3
    assert seen["ramet_score_candidates_total", ""] == 2
    assert seen["ramet_kv_sharing_ratio", ""] == stats.pages.sharing_ratio
    assert seen["ramet_requests_total", "endpoint=/v1/completions,status=2xx"] == 2
    assert seen["ramet_requests_total", "endpoint=/v1/branches/{branch_id}/fork,status=2xx"] == 1
    assert not any(math.isnan(value) for value in seen.values())
    for tree in (pinned["tree_id"], leased["tree_id"], api.get(plain)["tree_id"]):
        api.drop(tree)
    seen = scrape(server)
    assert seen["ramet_prunes_total", "reason=explicit"] == 6
    assert seen["ramet_branches", "state=idle"] == seen["ramet_trees", ""] == 0
    assert seen["ramet_kv_blocks", "state=active"] == 0


def test_streams_are_timed(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True})
    seen = scrape(server)
    label = "endpoint=/v1/completions"
    assert seen["ramet_time_to_first_token_seconds_count", label] == 1
    assert 0.002 < seen["ramet_time_to_first_token_seconds_sum", label] < 1
    assert seen["ramet_inter_token_latency_seconds_count", label] >= 1
    assert seen["ramet_request_seconds_count", label] == 1


def test_who_goes_away_and_who_cancels_is_counted(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    for stream in (True, False):
        raw = send(server, "/v1/completions", {"prompt": "a", "max_tokens": 3000, "stream": stream})
        server.wait_until(lambda: bool(server.llm.engine.sequences))
        raw.close()
        server.wait_until(lambda: not server.llm.engine.sequences)
    headers = {"x-request-id": "mine"}
    body = {"prompt": "a", "max_tokens": 3000}
    thread = threading.Thread(target=lambda: server.post("/v1/completions", body, headers=headers))
    thread.start()
    server.wait_until(lambda: bool(server.llm.engine.sequences))
    server.wait_until(lambda: server.post("/v1/requests/mine/cancel").status_code == 200)
    thread.join(10)
    server.wait_until(lambda: scrape(server)["ramet_cancelled_total", "cause=disconnect"] == 2)
    assert scrape(server)["ramet_cancelled_total", "cause=request"] == 1


def test_series_do_not_grow_with_what_clients_send(serve: Serve) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(keys=keys, open_paths=("/metrics",))

    def burst(count: int) -> None:
        for index in range(count):
            headers = {"authorization": f"Bearer {keys[index % 2]}", "x-request-id": f"r{index}"}
            body = {"prompt": f"{index}", "max_tokens": 1, "user": f"u{index}", "stop": f"s{index}"}
            server.post("/v1/completions", body, headers=headers)
            server.post("/v1/completions", {**body, "model": f"m{index}"}, headers=headers)
            server.get(f"/nowhere/{index}", headers=headers)
            server.get(f"/v1/models/{index}", headers=headers)
            server.get(f"/v1/branches/br_{index}", headers=headers)
            server.get("/version", headers={"authorization": f"Bearer {index}"})

    burst(2)
    scrape(server)  # which is a request itself
    before = set(scrape(server))
    burst(40)
    assert set(scrape(server)) == before
    text = server.get("/metrics").text
    assert "key-" not in text and "nowhere" not in text and "sk-first" not in text


def test_every_panel_of_the_dashboard_has_its_metrics(serve: Serve) -> None:
    server = serve()
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True})
    names = {name for name, _ in scrape(server)}
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) == 15
    for panel in panels:
        for target in panel["targets"]:
            asked = re.findall(r"ramet_\w+", target["expr"])
            assert asked, panel["title"]
            assert set(asked) <= names, f"{panel['title']}: {set(asked) - names}"
            labels = [labels for name, labels in scrape(server) if name in asked]
            known = {one.split("=")[0] for many in labels for one in many.split(",")}
            for by in re.findall(r"by \(([^)]*)\)", target["expr"]):
                assert {one.strip() for one in by.split(",")} <= known


def test_vllms_names_are_there_if_asked_for(serve: Serve) -> None:
    server = serve(vllm_metrics=True)
    server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 3, "stream": True})
    seen = scrape(server)
    label = "model_name=m"
    assert seen["vllm:prompt_tokens_total", label] == seen["ramet_prompt_tokens_total", ""] == 40
    assert seen["vllm:generation_tokens_total", label] == 3
    assert seen["vllm:prefix_cache_hits_total", label] <= seen["vllm:prefix_cache_queries_total", label]
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert seen[name, label] == 0
    assert seen["vllm:time_to_first_token_seconds_count", f"endpoint=/v1/completions,{label}"] == 1
    assert not any(name.startswith("vllm:") for name, _ in scrape(serve()))
