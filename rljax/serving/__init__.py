"""An OpenAI-compatible endpoint over the sampler: text in and out by HTTP.

The decode thread (worker), the fields of a request and their bounds (fields), text as tokens come
(text), the JSON of answers (answers), counters (metrics). The routes (app), who may ask (guard) and
HTTP (connections) need the extra `serve`: starlette and uvicorn.
"""
