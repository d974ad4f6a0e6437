"""Text and files on one side, token arrays on the other; nothing here touches a device.

Prompts: `rows.read` (files, tasks, TFDS, lists -> raw rows) -> `rows.sources` (checked records) ->
`online.prompts` (records -> token ids, padded arrays), with `text.tokenizer` and `text.chat` for
the text. `online.loader` decides which records come when (`online.stream` where they have no end).
A task (`tasks`) brings its reward along (`online.default_rewards`). `rows.prepare` and `rows.show`
are what `rljax data prepare` and `rljax inspect` run.

Offline training has the same stages: `offline.rows` (pairs, labels, steps, trajectories) ->
`offline.encode` (ids and masks) -> `offline.packing` -> `offline.batches` (a Batch).
"""
