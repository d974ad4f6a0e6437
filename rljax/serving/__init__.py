"""An OpenAI-compatible endpoint over the sampler: text in and out by HTTP.

What lives here: the decode thread (worker), what a request may ask (fields), text as tokens come
(text), the JSON of answers (answers), the routes (app). What does not: decoding (rljax.sampler),
templates and tokenizers (rljax.data). `app` alone needs the extra `rljax[serve]`.
"""
