"""The kinds of things that are kept, and how much of each: one line a kind."""

from __future__ import annotations

from collections.abc import Callable

from app.api.store.entries import StoreLimits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore, ask_local
from app.config.ingress import IngressConfig

Stores = Callable[[str], TenantStore]  # the store of a kind


def store_limits(ingress: IngressConfig) -> dict[str, StoreLimits]:
    """Returns what bounds each kind."""
    responses = (ingress.max_stored_responses, ingress.max_stored_bytes)
    answers = (ingress.max_kept_answers, ingress.max_kept_answer_bytes)
    file_bytes = (ingress.max_file_store_bytes, ingress.max_tenant_file_store_bytes)
    return {
        "responses": StoreLimits(*responses, *responses, evicts=True),
        "answers": StoreLimits(*answers, *answers, evicts=True),
        "files": StoreLimits(ingress.max_files, file_bytes[0], ingress.max_tenant_files, file_bytes[1]),
        "batches": StoreLimits(4096, 64 << 20, 1024, 16 << 20, evicts=True, keeps_lost=True),
    }


def local_stores(ingress: IngressConfig) -> Stores:
    """Stores in this process: enough where there is one ingress replica."""
    stores = {kind: TenantStore(ask_local(LocalStore(limits))) for kind, limits in store_limits(ingress).items()}
    return stores.__getitem__
