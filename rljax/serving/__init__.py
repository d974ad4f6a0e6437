"""An OpenAI-compatible endpoint over the sampler: text in and out by HTTP.

The modules are: the decode thread (worker), the fields of a request and their bounds (fields), the
text of a response while its tokens come (text), the JSON of answers (answers), and counters
(metrics). The routes (app), the check of who may ask (guard) and HTTP (connections) need the extra
`serve`: starlette and uvicorn.
"""
