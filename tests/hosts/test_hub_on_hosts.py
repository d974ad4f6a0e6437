"""The hub on several hosts: the first one asks which commit it is, each downloads that."""

import json

import pytest
from hub_server import environment, running_hub
from on_hosts import all_well, on_hosts

SCRIPT = """
import json, os, sys
from pathlib import Path
os.environ["HF_HOME"] = f"{sys.argv[1]}/{os.environ['RLJAX_HOST']}"  # a disk of its own
from rljax import hosts, hub
from rljax.config import Config
from rljax.training.hub_commits import with_commits

hosts.start(60)
made = Config(model="me/tiny")
made.data.train = "hf://datasets/me/rows"
new, _ = with_commits(made, Path(sys.argv[1]) / "run")
rows = hub.split_files(new.data.train, "train").files[0].read_text()
folder = hub.model_folder(new.model, hub.CONFIG)
print(json.dumps([new.model, new.data.train, rows, str(folder)]))
"""


@pytest.mark.hosts
def test_all_hosts_read_the_commit_that_the_first_one_was_told(tmp_path):
    with running_hub() as server:
        commit = server.put("me/tiny", {"config.json": "{}"})
        rows = server.put("me/rows", {"train.jsonl": '{"a": 1}\n'}, "dataset")
        env = environment(server, tmp_path)
        ends = all_well(on_hosts(2, 1, ["-c", SCRIPT, tmp_path], **env))
        said = [json.loads(end.out.strip().splitlines()[-1]) for end in ends]
        for host, (model, data, text, folder) in enumerate(said):
            assert model == f"hf://me/tiny@{commit}" and data == f"hf://datasets/me/rows@{rows}"
            assert text == '{"a": 1}\n' and folder.startswith(f"{tmp_path}/{host}/")
        asked = [
            path for path in server.paths("GET") if path.startswith("/api/") and "main" in path
        ]
        plain = [path for path in server.paths("GET") if path in ("/api/models/me/tiny",)]
        assert len(plain) == 1 and asked == []
