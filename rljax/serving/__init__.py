"""An OpenAI-compatible endpoint over the sampler: text in and out by HTTP.

The decode thread (worker), the fields of a request (fields), text as tokens come (text), the JSON
of answers (answers), the routes (app). `app` alone needs the extra `rljax[serve]`.
"""
