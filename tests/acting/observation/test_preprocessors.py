from __future__ import annotations

import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from aiorl.acting.preprocessors import (
    BoxPreprocessor,
    IdentityPreprocessor,
    OneHotPreprocessor,
    Preprocessor,
    make_preprocessor,
    preprocessor_for,
)
from aiorl.data.obs_layout import layout_of
from aiorl.errors import BatchError, ConfigError, UnsupportedSpaceError


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "identity"),
    [
        (spaces.Box(-1, 1, (4,), np.float32), (4,), np.float32, True),
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), (84, 84, 4), np.uint8, True),
        (spaces.Box(-1, 1, (), np.float32), (1,), np.float32, False),
        (spaces.Discrete(5, start=3), (5,), np.float32, False),
        (spaces.MultiBinary([2, 3]), (2, 3), np.float32, False),
        (spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[0, 1], [5, 0]]), (8,), np.float32, False),
    ],
)
def test_shape_and_dtype_of_model_inputs(space, shape, dtype, identity):
    preprocessor = preprocessor_for(space)
    space.seed(0)
    obs = np.stack([np.asarray(space.sample()) for _ in range(7)])
    out = preprocessor.transform(obs)
    assert (preprocessor.shape, preprocessor.dtype, preprocessor.is_identity) == (
        shape,
        dtype,
        identity,
    )
    assert (out.shape, out.dtype) == ((7, *shape), dtype)
    if not isinstance(space, spaces.Box):
        expected = [gymnasium.spaces.flatten(space, np.asarray(row)) for row in obs]
        np.testing.assert_array_equal(out.reshape(7, -1), expected)
    else:
        np.testing.assert_array_equal(out.reshape(obs.shape), obs.astype(dtype))


NESTED = spaces.Dict(
    {
        "z": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2, 2), np.float64)]),
        "a": spaces.MultiBinary(2),
        "image": spaces.Box(0, 255, (2, 2, 1), np.uint8),
    }
)
simple_spaces = st.sampled_from(
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-np.inf, np.inf, (), np.float64),
        spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary((2, 2)),
    ]
)
nested_spaces = st.recursive(
    simple_spaces,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        | st.dictionaries(st.sampled_from("cab"), inner, min_size=1, max_size=3).map(spaces.Dict)
    ),
    max_leaves=6,
)


@given(space=nested_spaces, rows=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_space_flattens_as_in_gymnasium(space, rows, seed):
    """R39, R32: the policy's space has the shape and bounds of the output, and is never nested."""
    space.seed(seed)
    observations = [space.sample() for _ in range(rows)]
    preprocessor = preprocessor_for(space)
    out = preprocessor.transform_rows(observations)
    assert (out.shape, out.dtype) == ((rows, *preprocessor.shape), preprocessor.dtype)
    expected = [gymnasium.spaces.flatten(space, obs) for obs in observations]
    np.testing.assert_allclose(out.reshape(rows, -1), expected, rtol=1e-6)
    input_space = preprocessor.observation_space
    assert isinstance(input_space, spaces.Box)
    assert (input_space.shape, input_space.dtype) == (preprocessor.shape, preprocessor.dtype)
    assert all(map(input_space.contains, out))
    # the same as a batch, in the form of vector environments
    batch = gymnasium.vector.utils.concatenate(
        space, observations, gymnasium.vector.utils.create_empty_array(space, rows)
    )
    np.testing.assert_array_equal(preprocessor.transform(batch), out)


@pytest.mark.parametrize(
    ("space", "observations"),
    [
        (spaces.Box(-1, 1, (2,)), [np.zeros(3)]),
        (spaces.Box(-1, 1, (2,)), [np.zeros(2), np.zeros(3)]),
        (spaces.Box(-1, 1, (2,)), ["text"]),
        (spaces.Box(0, 255, (2,), np.uint8), [np.array([0.5, 1.0])]),
        (spaces.Discrete(3), [3]),
        (spaces.Discrete(3), [-1]),
        (spaces.Discrete(3), [0.5]),
        (spaces.MultiDiscrete([2, 3]), [np.array([0, 3])]),
        (NESTED, [{"a": np.zeros(2)}]),
        (NESTED, [{"z": (1, np.zeros((2, 2))), "a": np.zeros(2), "picture": np.zeros((2, 2, 1))}]),
        (NESTED, [(1, 2, 3)]),
        (spaces.Tuple([spaces.Discrete(2)]), [3]),
        (spaces.Tuple([spaces.Discrete(2)]), [(0, 1)]),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_refused(space, observations):
    with pytest.raises(BatchError, match="obs"):
        preprocessor_for(space).transform_rows(observations)


def test_r24_the_identity_leaves_arrays_unchanged():
    space = spaces.Box(-1, 1, (2, 2), np.float64)
    preprocessor = make_preprocessor(space, is_enabled=False)
    assert isinstance(preprocessor, IdentityPreprocessor)
    obs = np.zeros((3, 2, 2))
    assert preprocessor.transform(obs) is obs
    assert preprocessor.observation_space is space
    assert preprocessor.dtype == np.float64


@pytest.mark.parametrize(
    "space", [spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])]
)
def test_r32_a_nested_space_needs_its_preprocessor(space):
    with pytest.raises(UnsupportedSpaceError):
        make_preprocessor(space, is_enabled=False)


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2**62, 2**62]),  # their sum overflows
        spaces.MultiDiscrete([2**63 - 1, 2**63 - 1]),
        spaces.Dict({"a": spaces.MultiDiscrete([2**62] * 4)}),
    ],
)
def test_numbers_of_too_many_values_are_refused(space):
    with pytest.raises(UnsupportedSpaceError):
        make_preprocessor(space)


class Doubled(Preprocessor):
    """A user's own preprocessor."""

    def __init__(self, space):
        super().__init__(space, (2,), np.float32)

    def transform(self, obs):
        return np.stack([obs[:, 0], obs[:, 0]], axis=1).astype(np.float32)


def test_r23_a_custom_preprocessor_comes_first(monkeypatch):
    space = spaces.Box(-1, 1, (1,))
    monkeypatch.setitem(
        sys.modules, "users_module", types.SimpleNamespace(Doubled=Doubled, other=1)
    )
    for custom in (Doubled, "users_module:Doubled"):
        preprocessor = make_preprocessor(space, custom_preprocessor=custom, is_enabled=False)
        assert preprocessor.transform_rows([np.array([0.5])]).tolist() == [[0.5, 0.5]]
    for wrong in ("users_module:other", "users_module:missing", int):
        with pytest.raises(ConfigError, match="custom_preprocessor"):
            make_preprocessor(space, custom_preprocessor=wrong)
    assert isinstance(make_preprocessor(spaces.Discrete(2)), OneHotPreprocessor)


# a MiniGrid mission is of no class that Gymnasium has
_TEXTS = [
    spaces.Text(3),
    spaces.Space(dtype=str),
]


@pytest.mark.parametrize(
    "space", [*_TEXTS, spaces.Tuple([]), spaces.Tuple([spaces.Text(2)]), spaces.Dict({})]
)
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(
        UnsupportedSpaceError, match="Box, Discrete, MultiBinary, MultiDiscrete"
    ) as caught:
        preprocessor_for(space)
    assert space not in _TEXTS or "wrappers" in caught.value.hint


class Scaled(BoxPreprocessor):
    """Preprocessor with another range than its space."""

    def transform(self, obs):
        return super().transform(obs).astype(np.float32) / 255.0 - 0.5


class Wider(Preprocessor):
    """Preprocessor with more numbers than its space."""

    def __init__(self, space):
        super().__init__(space, (2, 3), np.float32)

    def transform(self, obs):
        return np.repeat(obs.reshape(len(obs), 2, 1), 3, axis=2).astype(np.float32)


class Summed(Preprocessor):
    """Preprocessor of a nested space, which gets batches of the components."""

    def __init__(self, space):
        super().__init__(space, (1,), np.float32)

    def transform(self, obs):
        return (
            obs["a"].sum(axis=1, keepdims=True) + obs["z"][1].sum(axis=(1, 2)).reshape(-1, 1)
        ).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "space"),
    [
        (Wider, spaces.Box(-1, 1, (2,))),
        (Wider, spaces.MultiDiscrete([3, 3])),
        (Scaled, spaces.Box(0, 255, (2, 2), np.uint8)),
        (Summed, NESTED),
    ],
)
def test_the_policys_space_is_that_of_a_custom_preprocessors_output(kind, space):
    """R23: SPEC 2.3. A user's class overrides nothing but its own conversion."""
    preprocessor = make_preprocessor(space, custom_preprocessor=kind)
    space.seed(0)
    out = preprocessor.transform_rows([space.sample() for _ in range(3)])
    input_space = preprocessor.observation_space
    assert (input_space.shape, input_space.dtype) == (preprocessor.shape, preprocessor.dtype)
    assert not preprocessor.is_identity
    if input_space.dtype == np.float32:
        assert (input_space.low == -np.inf).all(), "bounds of the input say nothing of other values"
        assert (input_space.high == np.inf).all()
        assert all(input_space.contains(row) for row in out)


def test_a_custom_preprocessor_with_a_wrong_output_shape_is_reported():
    class Wrong(Wider):
        def transform(self, obs):
            return super().transform(obs)[:, 0]

    with pytest.raises(BatchError, match=r"Wrong.transform .*\[1, 2, 3\].*\[1, 3\]"):
        make_preprocessor(spaces.Box(-1, 1, (2,)), custom_preprocessor=Wrong).transform_rows(
            [np.zeros(2)]
        )


@pytest.mark.parametrize(
    "space", [spaces.Discrete(100_000), spaces.MultiDiscrete([10_000, 10_000])], ids=str
)
def test_more_values_than_a_row_can_hold_are_refused_with_advice(space):
    for nested in (space, spaces.Dict({"a": space})):
        with pytest.raises(UnsupportedSpaceError, match="custom_preprocessor"):
            preprocessor_for(nested)
    assert preprocessor_for(spaces.Discrete(500)).shape == (500,)


def test_parts_of_a_nested_observation_have_names():
    layout = preprocessor_for(NESTED).layout
    assert layout.parts == {"a": (2,), "image": (2, 2, 1), "z.0": (3,), "z.1": (2, 2)}
    assert make_preprocessor(NESTED, custom_preprocessor=Summed).layout.parts == {}


# --- action masks ---

PIXELS = spaces.Box(0, 255, (4, 4, 1), np.uint8)


def masked(inner, mask_space=None):
    return spaces.Dict(
        {"observation": inner, "action_mask": mask_space or spaces.Box(0, 1, (3,), np.int8)}
    )


@pytest.mark.parametrize(
    "inner", [PIXELS, spaces.Box(-1, 1, (2, 2)), spaces.Discrete(4), NESTED], ids=str
)
def test_an_action_mask_precedes_the_model_input_of_the_rest(inner):
    space = masked(inner)
    preprocessor = make_preprocessor(space, action_space=spaces.Discrete(3))
    plain = preprocessor_for(inner)
    layout = preprocessor.layout
    assert (layout.shape, layout.num_mask, layout.parts) == (plain.shape, 3, plain.layout.parts)
    assert preprocessor.shape == layout.array_shape == (int(np.prod(plain.shape)) + 3,)
    assert preprocessor.dtype == plain.dtype
    space.seed(0)
    observations = [space.sample() for _ in range(5)]
    out = preprocessor.transform_rows(observations)
    obs, mask = layout.split(out)
    np.testing.assert_array_equal(
        obs, plain.transform_rows([row["observation"] for row in observations])
    )
    np.testing.assert_array_equal(mask, [row["action_mask"] for row in observations])
    input_space = preprocessor.observation_space
    assert layout_of(input_space) == layout
    assert all(input_space.contains(row) for row in out)
    batch = gymnasium.vector.utils.concatenate(
        space, observations, gymnasium.vector.utils.create_empty_array(space, 5)
    )
    np.testing.assert_array_equal(preprocessor.transform(batch), out)
    if inner is not PIXELS and inner is not NESTED:
        flat = [gymnasium.spaces.flatten(space, row) for row in observations]
        np.testing.assert_array_equal(out, flat, "as Gymnasium flattens the two")


def test_several_other_parts_are_one_vector_and_without_actions_a_mask_is_a_part_like_any():
    space = spaces.Dict(
        {"a": spaces.Discrete(2), "action_mask": spaces.MultiBinary(3), "b": spaces.Discrete(3)}
    )
    obs = {"a": 1, "action_mask": np.array([1, 0, 1]), "b": 2}
    preprocessor = make_preprocessor(space, action_space=spaces.Discrete(3))
    assert preprocessor.transform_rows([obs]).tolist() == [[1, 0, 1, 0, 1, 0, 0, 1]]
    assert preprocessor.layout.parts == {"a": (2,), "b": (3,)}
    assert make_preprocessor(space).transform_rows([obs]).tolist() == [[0, 1, 1, 0, 1, 0, 0, 1]]


def test_a_custom_preprocessor_sees_no_mask():
    space = masked(spaces.Box(-1, 1, (2,)))
    preprocessor = make_preprocessor(
        space, action_space=spaces.Discrete(3), custom_preprocessor=Wider
    )
    row = preprocessor.transform_rows(
        [{"observation": np.array([1, 2]), "action_mask": np.array([0, 1, 0])}]
    )
    assert row.tolist() == [[0, 1, 0, 1, 1, 1, 2, 2, 2]]
    assert preprocessor.observation_space.shape == (9,)
    raw = make_preprocessor(space, action_space=spaces.Discrete(3), is_enabled=False)
    assert raw.transform_rows([space.sample()]).shape == (1, 5)


@pytest.mark.parametrize(
    "obs",
    [
        np.zeros(2),
        {"observation": np.zeros(2)},
        {"observation": np.zeros(2), "action_mask": np.ones(2)},
        {"observation": np.zeros(2), "action_mask": np.array([0, 1, 2])},
        {"observation": np.zeros(3), "action_mask": np.ones(3)},
    ],
)
def test_an_observation_with_a_mask_that_does_not_fit_is_refused(obs):
    preprocessor = make_preprocessor(
        masked(spaces.Box(-1, 1, (2,))), action_space=spaces.Discrete(3)
    )
    with pytest.raises(BatchError, match=r"obs|action_mask"):
        preprocessor.transform_rows([obs])


def test_a_mask_that_does_not_fit_the_action_space_is_refused_at_construction():
    with pytest.raises(UnsupportedSpaceError, match=r" 3 .*Discrete\(3\)"):
        make_preprocessor(masked(PIXELS, spaces.MultiBinary(4)), action_space=spaces.Discrete(3))
    only = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    with pytest.raises(UnsupportedSpaceError):
        make_preprocessor(only, action_space=spaces.Discrete(3))


class RLlibsForm(Preprocessor):
    def _init_shape(self, obs_space, options):
        return obs_space.shape

    def transform(self, observation):
        return observation


class Float64(Preprocessor):
    def __init__(self, space):
        super().__init__(space, space.shape, np.float64)

    def transform(self, obs):
        return obs


class Failing(Wider):
    def transform(self, obs):
        return 1 / 0


@pytest.mark.parametrize("kind", [RLlibsForm, Float64, Preprocessor])
def test_a_custom_preprocessor_that_cannot_be_made_is_refused_with_the_form_expected(kind):
    with pytest.raises(ConfigError) as caught:
        make_preprocessor(spaces.Box(-1, 1, (2,)), custom_preprocessor=kind)
    assert caught.value.key == "model.custom_preprocessor"
    assert "super().__init__(" in caught.value.hint
    failing = make_preprocessor(spaces.Box(-1, 1, (2,)), custom_preprocessor=Failing)
    with pytest.raises(ConfigError, match="ZeroDivisionError") as caught:
        failing.transform_rows([np.zeros(2)])
    assert caught.value.key == "model.custom_preprocessor"
