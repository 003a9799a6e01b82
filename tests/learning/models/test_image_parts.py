"""Images in Dict and Tuple observations: each has convolutions, and all other parts follow their
features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution, make_named_distribution
from aiorl.acting.filters import MeanStdFilter, NoFilter
from aiorl.acting.preprocessors import make_preprocessor
from aiorl.config.schema import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.critics import Critics
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.q_network import QNetwork

SPEED = spaces.Box(-1.0, 1.0, (2,))
CHANNELS_FIRST = spaces.Box(0, 255, (3, 9, 16), np.uint8)
CHANNELS_LAST = spaces.Box(0, 255, (9, 16, 3), np.uint8)
FOUR = spaces.Discrete(4)
SMALL = ModelConfig(fcnet_hiddens=(8,))
CONV_FEATURES = 256  # of the hidden layer that follows the convolutions of small images


def layout_of(space: Any, observation_filter: Any = None) -> ObsLayout:
    preprocessor = make_preprocessor(space, action_space=FOUR)
    return (observation_filter or NoFilter()).output_layout(preprocessor.layout)


def rows_of(space: Any, observations: Any) -> Any:
    return make_preprocessor(space, action_space=FOUR).transform_rows(observations)


def built(space: Any, *, distribution: Any = None, **model: Any) -> Any:
    layout = layout_of(space)
    kind = distribution or make_distribution(FOUR)
    settings = {**SMALL.model_dump(), **model}
    return build_model(layout.array_shape, "float32", kind, settings, seed=1, layout=layout)


def kernels(model: Any) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(item.shape)
        for name, item in model.variables.items()
        if name.endswith("/kernel")
    }


@pytest.mark.parametrize(
    "image", [CHANNELS_FIRST, CHANNELS_LAST], ids=["channels first", "channels last"]
)
def test_an_image_has_convolutions_and_the_other_parts_follow_its_features(image: Any) -> None:
    found = kernels(
        built(spaces.Dict({"speed": SPEED, "camera": image, "gear": spaces.Discrete(3)}))
    )
    assert {name: shape for name, shape in found.items() if name.startswith("policy")} == {
        "policy/image_0/conv_0/kernel": (3, 3, 3, 16),
        "policy/image_0/conv_1/kernel": (3, 3, 16, 32),
        "policy/image_0/dense_0/kernel": (1 * 3 * 32, CONV_FEATURES),
        "policy/dense_0/kernel": (CONV_FEATURES + 2 + 3, 8),
        "policy/head/kernel": (8, 4),
    }
    assert "value/image_0/conv_0/kernel" in found


def test_an_image_gives_the_same_outputs_whichever_place_its_channels_and_its_part_have() -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 9, 16, 3), dtype=np.uint8)
    speeds = rng.normal(size=(4, 2)).astype(np.float32)
    last = spaces.Tuple([CHANNELS_LAST, SPEED])
    first = spaces.Tuple([SPEED, spaces.Dict({"camera": CHANNELS_FIRST})])
    of_last = rows_of(last, list(zip(pictures, speeds, strict=True)))
    observations = [
        (speed, {"camera": picture.transpose(2, 0, 1)})
        for picture, speed in zip(pictures, speeds, strict=True)
    ]
    of_first = rows_of(first, observations)
    outputs = [built(last).forward(of_last), built(first).forward(of_first)]
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    changed = of_last.copy()
    changed[:, -1] += 1.0
    assert not np.allclose(built(last).forward(changed)[1], outputs[0][1]), "the other parts matter"


def test_bytes_are_scaled_unless_a_filter_has_normalised_them() -> None:
    space = spaces.Dict({"camera": CHANNELS_FIRST, "speed": SPEED})
    plain = layout_of(space)
    filtered = layout_of(space, MeanStdFilter(plain.array_shape))
    models = [
        build_model(
            plain.array_shape,
            "float32",
            make_distribution(FOUR),
            SMALL.model_dump(),
            seed=1,
            layout=layout,
        )
        for layout in (plain, filtered)
    ]
    rows = np.random.default_rng(0).uniform(0, 255, (3, *plain.array_shape)).astype(np.float32)
    scaled = rows.copy()
    scaled[:, : 3 * 9 * 16] /= 255.0
    np.testing.assert_allclose(
        models[0].forward(rows)[1], models[1].forward(scaled)[1], rtol=1e-4, atol=1e-5
    )


def test_own_filters_are_for_every_image_and_fcnet_hiddens_follow() -> None:
    space = spaces.Tuple([CHANNELS_FIRST, CHANNELS_LAST, SPEED])
    found = kernels(built(space, conv_filters=[[4, 3, 2]]))
    assert found["policy/image_1/conv_0/kernel"] == (3, 3, 3, 4)
    assert found["policy/dense_0/kernel"] == (2 * 4 * 7 * 4 + 2, 8)
    assert "policy/image_0/dense_0/kernel" not in found
    with pytest.raises(ConfigError) as refused:
        built(spaces.Tuple([SPEED, SPEED]), conv_filters=[[4, 3, 2]])
    assert refused.value.key == "model.conv_filters"


def test_settings_of_earlier_versions_flatten_images() -> None:
    space = spaces.Dict({"camera": CHANNELS_FIRST, "speed": SPEED})
    layout = layout_of(space)
    settings = {name: value for name, value in SMALL.model_dump().items() if name != "conv_parts"}
    for given in (settings, {**settings, "conv_parts": False}):
        model = build_model(
            layout.array_shape, "float32", make_distribution(FOUR), given, seed=1, layout=layout
        )
        assert kernels(model)["policy/dense_0/kernel"] == (3 * 9 * 16 + 2, 8)


def test_small_parts_and_ambiguous_names_are_flattened() -> None:
    tiny = spaces.Dict({"camera": spaces.Box(0, 255, (3, 3, 3), np.uint8), "speed": SPEED})
    ambiguous = spaces.Dict({"a.b": CHANNELS_LAST, "a": spaces.Dict({"b": SPEED})})
    for space in (tiny, ambiguous):
        assert "policy/image_0/conv_0/kernel" not in kernels(built(space))


def test_a_recurrent_network_and_its_acting_graph_see_images_in_parts() -> None:
    model = built(
        spaces.Dict({"camera": CHANNELS_FIRST, "speed": SPEED}), use_lstm=True, vf_share_layers=True
    )
    assert kernels(model)["shared/lstm/kernel"] == (8, 4 * 64)
    graph, _ = export_acting_graph(model)  # checks the graph against the model
    assert graph


def test_networks_of_action_values_and_critics_see_images_in_parts() -> None:
    layout = layout_of(spaces.Dict({"camera": CHANNELS_FIRST, "speed": SPEED}))
    rng = np.random.default_rng(0)
    rows = rng.uniform(0, 255, (2, *layout.array_shape)).astype(np.float32)
    greedy: Any = make_named_distribution("greedy", FOUR)
    q_network = QNetwork(
        layout, "float32", greedy, SMALL, rng, is_dueling=True, dueling_hiddens=(5,)
    )
    assert q_network.q(rows)[0].shape == (2, 4)
    box = make_distribution(spaces.Box(-1.0, 1.0, (2,)), squash=True)
    critics = Critics(layout, "float32", box, SMALL, rng, num_critics=2)
    assert critics.q(rows, np.zeros((2, 2), np.float32)).shape == (2, 2)
    assert kernels(q_network)["q/image_0/conv_0/kernel"] == (3, 3, 3, 16)
    assert kernels(critics)["critic_1/image_0/conv_0/kernel"] == (3, 3, 3, 16)
    # the action joins the features of images and the other parts
    assert kernels(critics)["critic_0/dense_0/kernel"] == (CONV_FEATURES + 2 + 2, 8)
