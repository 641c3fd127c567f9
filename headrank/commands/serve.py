"""Serve reranking over HTTP to clients of Cohere, Jina, vLLM and text-embeddings-inference, all on one port.

The port opens at once; /ready says 200 when the model is loaded. On SIGTERM accepted requests are finished. Needs the
extra 'serve': pip install 'headrank[serve]'. Try it: curl http://127.0.0.1:8000/rerank -H 'Content-Type:
application/json' -d '{"query": "...", "documents": ["...", "..."]}'
"""

from __future__ import annotations

import argparse

from headrank.commands import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank serve`."""
    options.add_model_arguments(parser)
    parser.add_argument("--heads", metavar="FILE", help="heads.json, or 'all' (default: the model's own)")
    options.add_store_arguments(parser)
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in answers (default: the last part of --model)"
    )
    parser.add_argument(
        "--relevance",
        metavar="FILE",
        help="curve of 'headrank fit-relevance', for answers in [0, 1] (default: headrank.json's, if any)",
    )
    parser.add_argument(
        "--collection",
        action="append",
        default=[],
        metavar="DIR",
        help="a collection folder whose queries and candidates the page at / offers; may be repeated",
    )
    parser.add_argument(
        "--mcp", action="store_true", help="also a tool for agents at /mcp (Model Context Protocol over HTTP)"
    )
    parser.add_argument("--no-playground", action="store_true", help="no page at /")
    group = parser.add_argument_group("access")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    group.add_argument("--port", type=_port, default=8000, help="port (default 8000; 0 lets the system choose)")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="accepted keys, one per line; clients send 'Authorization: Bearer KEY'"
    )
    group.add_argument(
        "--open-to-anyone",
        action="store_true",
        help="listen on an address that others can reach, without keys (behind a proxy that asks)",
    )
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-requests",
        action="store_true",
        help="one line per rerank request: path, status, documents, milliseconds; no texts",
    )
    group.add_argument("--log-texts", action="store_true", help="the same with query and documents, as JSON")
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-batch-tokens",
        type=options.positive_int,
        metavar="N",
        help="tokens computed together (2048 on a CPU, 32768 on a GPU)",
    )
    group.add_argument(
        "--max-queue",
        type=options.positive_int,
        default=256,
        metavar="N",
        help="lists that may wait; beyond it a request gets 429 (256)",
    )
    group.add_argument(
        "--max-documents", type=options.positive_int, default=1000, metavar="N", help="documents per request (1000)"
    )
    group.add_argument(
        "--max-query-tokens", type=options.positive_int, default=1024, metavar="N", help="tokens of a query (1024)"
    )
    group.add_argument(
        "--max-list-tokens", type=options.positive_int, default=1 << 17, metavar="N", help="tokens per list (131072)"
    )
    group.add_argument(
        "--max-chunks-per-doc",
        type=options.positive_int,
        default=8,
        metavar="N",
        help="chunks of a long document at most (8; 1 cuts it)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=options.positive_int,
        default=8 << 20,
        metavar="N",
        help="bytes per request body (8388608)",
    )
    group.add_argument(
        "--request-seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds a request may wait before it gets 503 (60)",
    )
    group.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds to finish running requests after SIGTERM (30)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    from headrank.serving.settings import ServeSettings

    settings = ServeSettings(
        model=args.model,
        heads=args.heads,
        store=args.store,
        store_add=args.store_add,
        key_cache_mb=args.key_cache_mb,
        collections=tuple(args.collection),
        has_mcp=args.mcp,
        has_playground=not args.no_playground,
        logs_requests=args.log_requests or args.log_texts,
        logs_texts=args.log_texts,
        served_name=args.served_model_name,
        relevance=args.relevance,
        max_chunks_per_doc=args.max_chunks_per_doc,
        device=args.device,
        dtype=args.dtype,
        host=args.host,
        port=args.port,
        api_key_file=args.api_key_file,
        is_open_to_anyone=args.open_to_anyone,
        max_batch_tokens=args.max_batch_tokens,
        max_queue=args.max_queue,
        max_body_bytes=args.max_body_bytes,
        max_documents=args.max_documents,
        max_list_tokens=args.max_list_tokens,
        max_query_tokens=args.max_query_tokens,
        request_seconds=args.request_seconds,
        drain_seconds=args.drain_seconds,
    )
    from headrank.serving.run import serve

    serve(settings)
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a port; give a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds") from None
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a sensible number of seconds")
    return value
