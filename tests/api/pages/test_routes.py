"""The pages as HTTP: headers, caching, nothing from elsewhere, nothing inline."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api.pages.routes import ASSETS, PAGES, SWAGGER


@pytest.mark.parametrize("path", PAGES)
def test_page_with_its_headers(http: httpx.Client, path: str) -> None:
    page = http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert (policy.get("require-trusted-types-for") == "'script'") == (path != "/docs"), "Swagger UI makes HTML"
    assert "unsafe" not in page.headers["content-security-policy"]


@pytest.mark.parametrize("path", PAGES)
def test_page_loads_only_what_the_server_has(http: httpx.Client, path: str) -> None:
    html = http.get(path).text
    assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|javascript:", html)
    for address in re.findall(r'(?:src|href)="([^"#][^"]*)"', html):
        assert not re.match(r"/|\w+:", address), "only relative addresses work under a route prefix"
        assert http.get(f"/{address.removeprefix('./')}").status_code == 200


def test_modules_import_only_what_the_server_has(http: httpx.Client) -> None:
    for name in ASSETS:
        asset = http.get(f"/pages/{name}")
        assert asset.status_code == 200
        assert asset.headers["x-content-type-options"] == "nosniff"
        if name.endswith(".js"):
            assert asset.headers["content-type"] == "text/javascript; charset=utf-8"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", asset.text)
            for imported in re.findall(r'from "([^"]+)"', asset.text):
                assert imported.removeprefix("./") in ASSETS
        if name.endswith(".css"):
            assert "url(" not in asset.text


def test_unchanged_files_are_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/pages/chat.js")
    again = http.get("/pages/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""
    assert http.get("/pages/chat.js", headers={"if-none-match": '"other"'}).content == first.content


def test_head_and_what_does_not_exist(http: httpx.Client) -> None:
    assert http.head("/").status_code == 200
    for path in ("/pages/routes.py", "/pages/../routes.py", "/pages/%2e%2e/app.py", "/pages/", "/pages/chat.html"):
        assert http.get(path).status_code == 404
    assert http.post("/").status_code == 405


def test_pages_stay_out_of_the_api_description(http: httpx.Client) -> None:
    assert not {"/", "/status", "/pages/chat.js"} & http.get("/openapi.json").json()["paths"].keys()


def test_pages_load_without_a_key_and_what_they_ask_for_does_not(guarded: Any) -> None:
    with TestClient(guarded) as http:
        for path in (*PAGES, *(f"/pages/{name}" for name in (*ASSETS, *SWAGGER))):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"authorization": "Bearer right-key"}).status_code == 200
