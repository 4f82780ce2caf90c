"""Published weaknesses that Manta is held against, each with the test that acts it out or why it cannot apply.

`python -m tools.security_docs` writes them into docs/security.md; tests/security/test_advisories.py keeps the list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advisory:
    """Published ids of one kind: what happened there, what is done here, and the tests of it."""

    ids: tuple[str, ...]
    product: str
    there: str
    here: str
    tests: tuple[str, ...] = ()  # node ids below tests/; none: `here` says why it cannot apply


@dataclass(frozen=True, slots=True)
class Kind:
    """One heading of the table."""

    name: str
    advisories: tuple[Advisory, ...]


_HAZARDS = "test_hazards.py"
_CLOSED = "e2e/test_closed.py"
_PEERS = "security/test_hostile_peers.py::test_a_pickle_before_the_secret_is_not_read"
_INGRESSES = "security/test_hostile_peers.py::test_nor_is_one_by_an_engine_replica"
_TRUSTED = "security/test_hostile_requests.py::test_what_other_servers_trust_is_refused_or_changes_nothing"
_LIMIT = "api/test_limit_table.py::test_one_too_many"
_FETCHING = (
    "media/test_fetching.py::test_a_name_that_changes_its_address_reaches_nothing",
    "media/test_fetching.py::test_what_is_refused_is_not_looked_up",
)
_HOSTILE = "media/test_hostile.py::test_each_is_refused_or_a_picture"
_HOSTILE_VIDEOS = "media/videos/test_hostile.py::test_each_is_refused_or_a_video"
_IDENTITY = "media/test_reader.py::test_identity_is_of_pixels_settings_and_tenant"
_OUTBOUND = "api/test_outbound.py::test_no_address_of_a_request_is_asked"
_TENANTS = "api/http/test_auth.py::test_tenants_share_no_prefix_blocks"
_DASHBOARD = f"{_CLOSED}::test_the_dashboard_asks_for_ray_s_token"
_RANGES = "security/test_advisories.py::test_libraries_are_behind_what_was_mended"
_ESCAPE = "security/test_hostile_models.py::test_a_model_s_template_does_not_leave_its_sandbox_on_any_route"
_LOOPS = "api/test_guards.py::test_a_template_that_never_ends_costs_a_400_and_nobody_else"
_GRAMMARS = "api/chat/test_response_format.py::test_hostile_grammars_are_refused_and_nobody_is_harmed"

KINDS = (
    Kind(
        "Objects read from sockets and files",
        (
            Advisory(
                ("CVE-2025-32444", "CVE-2025-29783", "CVE-2025-30165", "CVE-2024-50050", "CVE-2025-23254"),
                "vLLM, Llama Stack, TensorRT-LLM",
                "pickles read from open ZMQ sockets",
                "workers and driver, ingresses and engine replicas show each other a secret before a frame is read",
                (_PEERS, _INGRESSES, f"{_CLOSED}::test_only_ray_listens_beyond_this_machine"),
            ),
            Advisory(
                ("CVE-2026-3059", "CVE-2026-3060", "CVE-2026-3989", "CVE-2026-7301"),
                "SGLang",
                "pickles read from brokers, dumps and routers",
                "no broker, no replay; only driver and workers read objects",
                (_PEERS, f"{_HAZARDS}::test_objects_are_read_only_between_a_driver_and_its_workers"),
            ),
            Advisory(
                ("CVE-2025-10164", "CVE-2026-86793"),
                "SGLang",
                "a pickle as the body of a weight update; a `safe` unpickler that was none",
                "bodies are JSON; new weights are named by a directory, on the operator's port",
                (
                    "security/test_hostile_requests.py::test_a_pickle_is_no_body",
                    "api/admin/test_app.py::test_only_an_operator_may",
                ),
            ),
            Advisory(
                ("CVE-2026-115912",),
                "vLLM",
                "a request's shared-memory handle led to a pickle",
                "requests carry no handles",
                (_TRUSTED,),
            ),
            Advisory(
                ("CVE-2025-62164", "CVE-2026-56340"),
                "vLLM",
                "`prompt_embeds`: a client's tensor loaded unchecked",
                "the field is refused",
                (_TRUSTED,),
            ),
            Advisory(
                ("CVE-2025-24357", "CVE-2025-32434", "CVE-2024-11394", "CVE-2025-14924"),
                "vLLM, PyTorch, transformers",
                "pickled checkpoints ran code, with `weights_only` too",
                "tensors only, by a torch behind the repair; other objects are an error that names the file",
                ("security/test_hostile_models.py::test_an_object_in_a_pickled_checkpoint_is_not_made", _RANGES),
            ),
            Advisory(
                ("CVE-2026-22807", "CVE-2026-41523"),
                "vLLM",
                "a model's `auto_map` was followed unasked; the guard was an `assert`",
                "never followed, under `python -O` neither",
                (
                    "security/test_hostile_models.py::test_code_of_a_model_directory_is_not_run",
                    "security/test_hostile_models.py::test_nor_where_python_drops_assertions",
                ),
            ),
            Advisory(
                ("CVE-2026-15971", "CVE-2026-111391"),
                "SGLang",
                "a dumper's `eval`",
                "no text becomes code",
                (f"{_HAZARDS}::test_no_text_becomes_code",),
            ),
        ),
    ),
    Kind(
        "Open administration, keys, ids",
        (
            Advisory(
                ("CVE-2023-48022", "CVE-2025-62593", "CVE-2026-27482", "CVE-2023-6019"),
                "Ray",
                "jobs, DELETE of applications and profiles for anybody, or for any page in a browser",
                "the dashboard asks for Ray's token, whatever the method and `Origin`",
                (_DASHBOARD, _RANGES),
            ),
            Advisory(
                ("CVE-2023-48023", "CVE-2023-6020", "CVE-2023-6021"),
                "Ray",
                "`/log_proxy` asked any address; files read by path",
                "behind the token; paths that climb are refused",
                (_DASHBOARD, f"{_CLOSED}::test_the_dashboard_gives_no_files"),
            ),
            Advisory(
                ("GHSA-gx77-xgc2-4888",),
                "Ray",
                "token authentication that was off",
                "all that is shipped turns it on",
                (
                    f"{_HAZARDS}::test_shipped_files_close_ray_by_its_token",
                    "cli/test_serve.py::test_a_cluster_of_its_own_is_closed",
                ),
            ),
            Advisory(
                ("CVE-2025-1979",),
                "Ray",
                "the password of Redis in logs",
                "a Ray behind the repair; no key is in any log",
                (
                    f"{_CLOSED}::test_no_log_holds_keys_prompts_or_answers",
                    "api/test_secrets.py::test_no_log_holds_them",
                    _RANGES,
                ),
            ),
            Advisory(
                ("CVE-2026-42208",),
                "LiteLLM",
                "SQL in an API key",
                "keys are digests in memory; no SQL",
                ("api/http/test_auth.py::test_the_rest_is_kept_out_in_the_route_s_dialect",),
            ),
            Advisory(
                ("CVE-2025-59425",),
                "vLLM",
                "keys compared with `==`",
                "digests, compared in constant time",
                ("api/http/test_auth.py::test_the_rest_is_kept_out_in_the_route_s_dialect",),
            ),
            Advisory(
                ("CVE-2026-112266",),
                "SGLang",
                "a short `rid` ended other users' requests",
                "the server draws ids; a response is cancelled by its whole id, by its owner",
                (
                    "security/test_hostile_requests.py::test_a_client_s_id_names_no_request_of_an_engine",
                    "security/test_hostile_requests.py::test_a_background_response_is_ended_by_its_whole_id_only",
                ),
            ),
        ),
    ),
    Kind(
        "Addresses and media of requests",
        (
            Advisory(
                ("CVE-2025-6242", "CVE-2026-24779"),
                "vLLM",
                "media URLs led into the network; a parser's quirk passed the list of allowed hosts",
                "nothing is fetched unless hosts are named; then only from these, looked up once, at public addresses",
                (_OUTBOUND, *_FETCHING),
            ),
            Advisory(
                ("CVE-2026-22778", "CVE-2026-5497", "CVE-2026-105760", "CVE-2026-22773"),
                "vLLM",
                "videos and pictures that took all memory, or ran code when decoded",
                "headers bound sizes before decoding, in processes with limits that may be killed",
                (_HOSTILE, _HOSTILE_VIDEOS, _TRUSTED),
            ),
        ),
    ),
    Kind(
        "Fields without bounds",
        (
            Advisory(("CVE-2026-34756",), "vLLM", "any `n`", "`max_n`, `max_choices`", (_LIMIT,)),
            Advisory(("CVE-2026-73559",), "vLLM", "any number of prompts", "`max_prompts`", (_LIMIT,)),
            Advisory(
                ("CVE-2025-48956",),
                "vLLM",
                "a giant header, before the key was looked at",
                "431 on every route and method",
                ("api/test_limit_table.py::test_headers",),
            ),
            Advisory(
                ("CVE-2026-116173", "PYSEC-2026-4350", "CVE-2026-105922"),
                "vLLM",
                "`logprob_token_ids` and penalties, bounded at some entrances only",
                "each field's own bound, on every route",
                ("api/test_limit_table.py::test_each_field_s_own_bound",),
            ),
            Advisory(
                ("CVE-2026-110807", "CVE-2026-110809"),
                "SGLang",
                "`/generate` and sessions that took all",
                "every limit on that route too; sessions hold nothing here",
                (_LIMIT, "api/test_limit_table.py::test_each_field_s_own_bound"),
            ),
            Advisory(
                ("CVE-2026-94626", "CVE-2026-94622", "CVE-2026-94623"),
                "vLLM",
                "a client's `kv_transfer_params` took all memory or ended the engine",
                "refused on every route",
                (_TRUSTED,),
            ),
            Advisory(
                ("CVE-2026-9540",),
                "vLLM",
                "what broken-off requests held was kept",
                "given back: blocks, rows, connections",
                (
                    "api/test_over_engine.py::test_a_disconnect_frees_the_blocks",
                    "e2e/test_hostile_clients.py::test_requests_that_give_up",
                ),
            ),
        ),
    ),
    Kind(
        "Patterns, schemas, templates",
        (
            Advisory(
                ("CVE-2026-55574", "CVE-2025-48942", "CVE-2025-48943", "CVE-2025-48944"),
                "vLLM",
                "regular expressions, schemas and tools that hung or ended the server",
                "compiled in a process that may be killed, with limits on time and memory",
                (
                    _GRAMMARS,
                    "structured/test_compiler.py::test_refusals_are_quick_and_say_why",
                    "structured/test_compiler.py::test_a_grammar_that_takes_too_long_costs_a_process",
                ),
            ),
            Advisory(
                ("CVE-2026-105757",),
                "vLLM",
                "a grammar's failure ended the engine",
                "its request fails alone",
                ("structured/test_in_engine.py::test_a_request_that_cannot_go_on_fails_alone",),
            ),
            Advisory(
                ("CVE-2025-71379", "CVE-2025-48887"),
                "vLLM",
                "patterns of its own parsers took exponential time",
                "parsers do linear work on the worst text",
                (
                    "parsers/test_transcripts.py::test_hostile_text_is_read_in_time",
                    "parsers/test_linear_work.py::test_an_endless_answer_is_searched_once",
                ),
            ),
            Advisory(
                ("CVE-2025-29770",),
                "vLLM",
                "compiled grammars filled the disk",
                "kept in memory, bounded in bytes",
                ("structured/test_compiler.py::test_the_cache_is_bounded_in_bytes",),
            ),
            Advisory(
                ("CVE-2025-2099", "CVE-2025-1194"),
                "transformers",
                "its own patterns took exponential time",
                "a transformers behind the repair",
                (_RANGES,),
            ),
            Advisory(
                ("CVE-2025-61620", "CVE-2025-62426", "CVE-2026-115911"),
                "vLLM",
                "a template, or `chat_template_kwargs`, that never ended",
                "time and size are limited; others are served",
                (_LOOPS, "text/test_template_sandbox.py::test_hostile_templates"),
            ),
            Advisory(
                ("CVE-2026-115918", "PYSEC-2026-4349"),
                "vLLM",
                "`/v1/responses` passed by the flag that forbids a request's template",
                "one flag for every route",
                (_TRUSTED, "api/test_guards.py::test_a_request_s_own_template_is_refused_unless_the_server_allows_it"),
            ),
            Advisory(
                ("CVE-2026-5760", "CVE-2026-42203", "CVE-2026-37004", "GHSA-46cm-pfwv-cgf8"),
                "SGLang, LiteLLM",
                "templates outside of any sandbox: `/v1/rerank`, `/prompts/test`",
                "an immutable sandbox, on every route that reaches one",
                (_ESCAPE,),
            ),
        ),
    ),
    Kind(
        "One request that ends the engine",
        (
            Advisory(
                ("CVE-2026-105756",),
                "vLLM",
                "a `cache_salt` that a cache backend did not expect",
                "any text is a salt; what is none is a 400",
                ("security/test_hostile_requests.py::test_many_cache_salts_change_nothing_but_the_root",),
            ),
            Advisory(
                ("CVE-2026-116180",),
                "vLLM",
                "`prompt_logprobs` beside a KV connector showed other tenants' memory",
                "computed anew, never loaded",
                ("engine/kv_connector/test_scheduling.py::test_prompt_logprobs_are_computed_and_not_loaded",),
            ),
            Advisory(
                ("PYSEC-2026-145",),
                "vLLM",
                "penalties beside a drafter",
                "every pair of request feature and engine mode runs, drafts among them",
                ("engine/test_pairs.py::test_pairs_of_request_features",),
            ),
            Advisory(
                ("PYSEC-2026-2303",),
                "vLLM",
                "`prompt_embeds` beside M-RoPE",
                "the field is refused",
                (_TRUSTED,),
            ),
            Advisory(
                ("PYSEC-2026-4353",),
                "vLLM",
                "overlapping placeholders at `/inference/v1/generate`",
                "`features` are refused there",
                (_TRUSTED, "api/openai/test_token_generation.py::test_refusals_name_the_field"),
            ),
            Advisory(
                ("CVE-2025-30202",),
                "vLLM",
                "a slow or foreign subscriber stopped the publisher",
                "nothing publishes on a socket; a slow reader holds its own request only",
                ("deployments/channel/test_channel_client.py::test_slow_client_holds_only_its_own_request",),
            ),
            Advisory(
                ("CVE-2026-94570",),
                "SGLang",
                "a stray message ended the thread that hands decodes over",
                "prefill and decode are one engine: there is no such message",
            ),
            Advisory(
                ("CVE-2026-105775",),
                "vLLM",
                "Mamba states read out of bounds",
                "a state's place is its request's row, which no message names; a row that pads has none",
                ("layers/test_state_layer.py::test_a_step_says_where_states_are_read_and_left",),
            ),
        ),
    ),
    Kind(
        "Caches that tell or are fed",
        (
            Advisory(
                ("CVE-2025-25183", "GHSA-rm76-4mrf-v9r8"),
                "vLLM",
                "prefixes named by a predictable hash",
                "keyed BLAKE2b",
                ("records/test_block_hash.py::test_it_is_keyed_blake2b_over_parent_tokens_and_extras",),
            ),
            Advisory(
                ("CVE-2025-46570",),
                "vLLM",
                "the time of an answer told what others had asked",
                "tenants share no blocks; 200 times, Mann-Whitney",
                (_TENANTS, f"{_CLOSED}::test_the_time_of_an_answer_tells_nobody_what_others_asked"),
            ),
            Advisory(
                ("CVE-2025-46722", "CVE-2026-24255"),
                "vLLM, Dynamo",
                "pictures or embeddings of one hash",
                "a keyed hash of all pixels, sizes and settings, each after its length; no embeddings of clients",
                (_IDENTITY, _TRUSTED),
            ),
            Advisory(
                ("CVE-2026-105754", "CVE-2026-111392"),
                "vLLM, SGLang",
                "hashes sent by clients",
                "the server makes all hashes; such fields are refused or change nothing",
                (_TRUSTED,),
            ),
            Advisory(
                ("CVE-2026-27794",),
                "LangGraph",
                "a cache that unpickled what lay in it",
                "the KV tier is this process's own memory; nothing is read back from files",
                (f"{_HAZARDS}::test_objects_are_read_only_between_a_driver_and_its_workers",),
            ),
            Advisory(
                ("CVE-2026-3108",),
                "vLLM",
                "drafts or KV across requests (a doubtful report)",
                "drafts never change a token, and come from outputs of the same root of blocks alone",
                ("worker/spec_decode/test_suffix.py::test_no_tenant_drafts_from_anothers_outputs",),
            ),
        ),
    ),
)
ADVISORIES = tuple(advisory for kind in KINDS for advisory in kind.advisories)
