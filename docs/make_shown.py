"""Takes the pictures of experiments/README.md from the runs of `make experiments`: the last image of a tag.

python -m docs.make_shown runs/experiments
"""

import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PICTURES = pathlib.Path(__file__).resolve().parent / "pictures"
# {file: (run below the directory, tag)}
SHOWN = {
    "copy-orthogonal.png": ("copy_memory/seed=0/train", "timestep/orthogonal/heatmap"),
    "copy-rnn.png": ("copy_memory_cell=rnn/seed=0/train", "timestep/rnn/heatmap"),
    "gan.png": ("gan/seed=0/shown", "points_made"),
    "vae-reconstructions.png": ("vae/seed=0/shown", "reconstructions"),
    "vae-samples.png": ("vae/seed=0/shown", "samples"),
}


def last_image(run, tag):
    """The PNG of the last step at which an image was written."""
    events = EventAccumulator(str(run), size_guidance={"images": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    names = [name for name in [*tags["images"], *tags["tensors"]] if name == tag or name.startswith(f"{tag}/")]
    if not names:
        raise SystemExit(f"{run} has no image {tag!r}; it has {tags['images']} and {tags['tensors']}.")
    if names[0] in tags["images"]:
        return events.Images(names[0])[-1].encoded_image_string
    return events.Tensors(names[0])[-1].tensor_proto.string_val[2]


def main(directory):
    for file, (run, tag) in SHOWN.items():
        if not (pathlib.Path(directory) / run).is_dir():
            print(f"{run} is not there: {file} stays as it is")
            continue
        (PICTURES / file).write_bytes(last_image(pathlib.Path(directory) / run, tag))
        print(PICTURES / file)


if __name__ == "__main__":
    main(sys.argv[1])
