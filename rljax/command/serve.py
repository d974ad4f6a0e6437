"""Serve: rljax serve --model=RUN_OR_MODEL_FOLDER [--port=8000 --slots=16]

An OpenAI-compatible endpoint: POST /v1/completions and /v1/chat/completions (streaming, n, stop,
seed, logprobs), GET /v1/models, /health, /metrics. Needs
`pip install 'starlette>=0.40' 'uvicorn>=0.30'`.
"""

from rljax.config.service_options import ServeOptions


def main(options: ServeOptions) -> None:
    """Serves until a signal."""
    from rljax.serving.saved import serve

    serve(options)
