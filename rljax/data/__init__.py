"""Text and files on one side, token arrays on the other; nothing here touches a device.

The flow: `rows` (files, tasks, TFDS, lists -> raw rows) -> `sources` (checked records) -> `prompts`
(records -> token ids, padded arrays), with `tokenizer` and `chat` for the text; `loader` decides
which records come when (`stream` where they have no end). A task (`tasks`) brings its reward along
(`own`). `prepare` and `show` are what launchers/prepare_data.py and inspect_data.py do.

Offline training has the same stages: `preference_rows` (pairs, labels, steps, trajectories) ->
`preferences` (ids and masks) -> `packing` -> `row_batches` (a Batch).
"""
