"""Atari environments: what the learner sees, is told and plays, on both backends."""

from pathlib import Path

import cv2
import gymnasium
import numpy as np
import pytest
from cases import slow
from cases_fresh import one_server, run_fresh
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecTransposeImage

from catnat.datamodules import make_atari_vec_env
from catnat.datamodules.atari import game_names, rom_of
from catnat.datamodules.atari_native import PairedAtariVecEnv

ROOT = Path(__file__).resolve().parent.parent
NOOP, FIRE, RIGHT, LEFT = range(4)  # of Breakout


@pytest.fixture
def make():
    """make_atari_vec_env, with the environments closed at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(make_atari_vec_env(*args, **{"num_threads": 1} | kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


def play(env, choose, steps):
    """The rows (observations, rewards, dones, infos, forced) of that many steps after a reset."""
    env.reset()
    rows = []
    for t in range(steps):
        forced = env.forced_actions
        rows.append((*env.step(choose(t)), forced))
    return rows


def always(action, n):
    return lambda t: np.full(n, action)


def at_random(n, num_actions=4, seed=0):
    actions = np.random.default_rng(seed).integers(num_actions, size=(10_000, n))
    return lambda t: actions[t]


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rom"),
    [
        ("Breakout", "breakout"),
        ("breakout", "breakout"),
        ("ALE/Breakout-v5", "breakout"),
        ("BreakoutNoFrameskip-v4", "breakout"),
        ("BreakoutDeterministic-v0", "breakout"),
        ("MsPacman", "ms_pacman"),
        ("ms_pacman", "ms_pacman"),
        ("ALE/MsPacman-v5", "ms_pacman"),
    ],
)
def test_a_game_goes_by_many_names(name, rom):
    assert rom_of(name) == rom


def test_every_game_has_a_name_gymnasium_knows():
    names = game_names()
    assert {"Breakout", "Seaquest"} <= set(names)
    assert all(f"ALE/{name}-v5" in gymnasium.registry for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Brekout", 2), "'Brekout' is not one of the 104 Atari games; did you mean Breakout?"),
        (("ALE/Seequest-v5", 2), "did you mean Seaquest?"),
        (("CartPole-v1", 2), "'CartPole-v1' is not one of"),
        (("Breakout-ram-v4", 2), "'Breakout-ram-v4'"),
        (("Breakout", 0), "num_envs must be at least 1, got 0"),
        (("Breakout", 2, "envpool"), "unknown backend 'envpool'; choose from native, sb3"),
    ],
)
def test_what_cannot_be_made_is_said(arguments, words):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        make_atari_vec_env(*arguments)
    assert words in str(error.value)


@one_server
@pytest.mark.slow
def test_data_modules_do_not_import_games():
    heavy = {"gymnasium", "ale_py", "stable_baselines3"}
    code = f"import sys, datamodules; print({heavy} & set(sys.modules))"
    out = run_fresh("-c", code)
    assert out.stdout.strip() == "set()", out.stderr


# -- what both backends promise -------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [slow(1), slow(2), 3])
@pytest.mark.parametrize("backend", ["native", "sb3"])
def test_the_contract_of_a_vector_environment(backend, num_envs, make):
    env = make("Breakout", num_envs, backend)
    shape = (4, 84, 84) if backend == "native" else (84, 84, 4)
    assert env.observation_space.shape == shape
    assert env.action_space == gymnasium.spaces.Discrete(4)
    observations = env.reset()
    for _ in range(3):
        assert observations.shape == (num_envs, *shape)
        assert observations.dtype == np.uint8
        assert all(each in env.observation_space for each in observations)
        observations, rewards, dones, infos = env.step(np.zeros(num_envs, np.int64))
        assert rewards.shape == dones.shape == (num_envs,)
        assert (rewards.dtype, dones.dtype) == (np.float32, np.bool_)
        assert len(infos) == num_envs
    assert env.env_is_wrapped(Monitor) == [True] * num_envs
    assert env.get_attr("render_mode", [0]) in ([None], ["rgb_array"])
    assert env.has_attr("render_mode") and not env.has_attr("no_such_thing")


@pytest.mark.parametrize("backend", ["native", "sb3"])
def test_policies_take_both_layouts(backend, make):
    env = make("Breakout", 2, backend)
    model = PPO("CnnPolicy", env, n_steps=4, batch_size=8, n_epochs=1, device="cpu")
    assert model.get_env().observation_space.shape == (4, 84, 84)
    assert isinstance(model.get_env(), VecTransposeImage) == (backend == "sb3")
    model.learn(8)
    actions, _ = model.predict(env.reset(), deterministic=True)
    assert actions.shape == (2,)


@pytest.mark.slow
def test_a_random_policy_scores_alike_on_both(make):
    """8 games each; the benchmark prints more."""
    scores = {}
    for backend in ("native", "sb3"):
        env = make("Breakout", 8, backend)
        env.reset()
        choose, found = at_random(8), {}
        for t in range(2000):
            for i, info in enumerate(env.step(choose(t))[3]):
                if "episode" in info:  # the first of each: quick games must not count more
                    found.setdefault(i, info["episode"]["r"])
            if len(found) == 8:
                break
        scores[backend] = np.array(list(found.values()))
    native, sb3 = scores["native"], scores["sb3"]
    assert len(native) == len(sb3) == 8
    error = np.sqrt((native.var(ddof=1) + sb3.var(ddof=1)) / 8)
    assert 0 < native.mean() < 4
    assert abs(native.mean() - sb3.mean()) < 3 * error


# -- the native backend ---------------------------------------------------------------------------


def test_frames_and_rewards_are_those_of_the_game(make):
    """Against the emulator one frame at a time: skip, maximum of two, gray, resize, stack."""
    env = make("Breakout", 1, noop_max=0, life_loss=False)
    raw = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    raw.reset(seed=0)
    raw.step(FIRE)  # as at a native reset
    first = env.reset()[0]
    assert not first[:3].any() and first[3].any()
    choose = at_random(1)
    total = 0
    for t in range(150):
        observations, rewards, _, _ = env.step(choose(t))
        action = int(env.actions_played[0])
        steps = [raw.step(action) for _ in range(4)]
        frame = np.maximum(steps[2][0], steps[3][0])
        gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        small = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)
        assert np.abs(observations[0, 3].astype(int) - small).max() <= 2
        assert rewards[0] == np.sign(sum(step[1] for step in steps))
        total += rewards[0]
    assert total > 0
    raw.close()


def test_frames_are_gray_before_their_maximum_is_taken(make):
    """In Ms. Pac-Man the ghosts flicker: there the order can be seen."""
    env = make("MsPacman", 1, noop_max=0, life_loss=False)
    raw = gymnasium.make("ALE/MsPacman-v5", frameskip=1, repeat_action_probability=0.0)
    raw.reset(seed=0)
    env.reset()
    other_order = 0
    for _ in range(60):
        observations = env.step([0])[0]
        frames, grays = [], []
        for _ in range(4):
            frames.append(raw.step(0)[0])
            grays.append(raw.unwrapped.ale.getScreenGrayscale())
        gray = np.maximum(grays[2], grays[3])
        small = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)
        assert np.array_equal(observations[0, 3], small)
        gray = cv2.cvtColor(np.maximum(frames[2], frames[3]), cv2.COLOR_RGB2GRAY)
        small = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)
        other_order += not np.array_equal(observations[0, 3], small)
    assert other_order
    raw.close()


@pytest.mark.parametrize(
    ("game", "noop_max", "frames"),
    [
        slow("Freeway", 0, {0}),
        ("Freeway", 3, {0, 1, 2}),
        slow("Breakout", 2, {1}),
        ("Breakout", 3, {1, 2}),
    ],
)
def test_a_reset_plays_fewer_no_ops_than_noop_max_and_fire_in_place_of_the_last(
    game, noop_max, frames, make
):
    env = make(game, 3, noop_max=noop_max)
    seen = set()
    for _ in range(6):
        env.reset()
        seen |= set(env._frames.tolist())
    assert seen == frames


WRONG_ACTIONS = [
    [0, 0, 0, 4],
    [0, -1, 0, 0],
    [0, 0, 0, 10**6],
    [0, 0, 0],
    [0, 0, 0, 0, 0],
    [[0], [0], [0], [0]],
    [0.5, 0, 0, 0],
    3,
    None,
    "FIRE",
]


def test_wrong_actions_are_refused_and_the_game_goes_on(make):
    env = make("Breakout", 4)
    env.reset()
    for actions in WRONG_ACTIONS:
        with pytest.raises(ValueError, match=r"actions lie in 0\.\.3, got|whole numbers, got"):
            env.step(actions)
    first = env.halves[0]
    with pytest.raises(ValueError, match=r"actions lie in 0\.\.3, got \[0, 4\]"):
        first.step([0, 4])
    assert not any(half._pending for half in env.halves)
    assert env.step(np.zeros(4, int))[0].shape == (4, 4, 84, 84)


def test_actions_may_be_any_whole_numbers(make):
    env = make("Breakout", 4)
    env.reset()
    arrays = [np.arange(4).astype(kind) for kind in (np.int32, np.int64, np.uint8)]
    for actions in ([0, 1, 2, 3], (0, 1, 2, 3), *arrays):
        env.step(actions)
        assert env.actions_played.tolist() == [0, 1, 2, 3]


def test_waiting_for_a_step_that_nobody_began_is_an_error(make):
    env = make("Breakout", 1)
    env.reset()
    with pytest.raises(RuntimeError, match="step_wait needs a step_async before it"):
        env.step_wait()


def test_a_lost_life_ends_the_episode_and_not_the_game(make):
    env = make("Breakout", 2)
    rows = play(env, always(NOOP, 2), 220)
    lives = [5]
    for t, (observations, _, dones, infos, forced) in enumerate(rows):
        if not dones[0]:
            assert infos[0] == {}
            continue
        assert infos[0]["TimeLimit.truncated"] is False
        if "episode" in infos[0]:
            break
        assert np.array_equal(infos[0]["terminal_observation"], observations[0])
        lives.append(lives[-1] - 1)
        assert forced[0] == -1
        assert rows[t + 1][4][0] == FIRE
    assert lives == [5, 4, 3, 2, 1]
    # The end of the game: the last frame of it, not the first one of the next.
    terminal = infos[0]["terminal_observation"]
    assert np.array_equal(terminal[:3], rows[t - 1][0][0][1:])
    assert not observations[0][:3].any()
    assert rows[t + 1][4][0] == -1  # the reset itself has fired
    assert infos[0]["episode"]["l"] == pytest.approx(4 * (t + 1), abs=35)


@pytest.mark.parametrize("action", [NOOP, slow(FIRE), slow(RIGHT), slow(LEFT)])
def test_breakout_is_never_stuck(action, make):
    env = make("Breakout", 2)
    rows = play(env, always(action, 2), 400)
    games = sum("episode" in info for row in rows for info in row[3])
    assert games >= 2


def test_the_learner_knows_what_was_played(make):
    env = make("Breakout", 4)
    env.reset()
    seen = 0
    for _ in range(120):
        forced = env.forced_actions
        env.step(np.full(4, LEFT))
        assert np.array_equal(env.actions_played, np.where(forced >= 0, forced, LEFT))
        seen += (forced >= 0).sum()
    assert seen >= 4
    free = make("Breakout", 4, life_loss=False)
    rows = play(free, always(LEFT, 4), 120)
    assert not any(row[2].any() for row in rows[:60])
    assert sum((row[4] >= 0).sum() for row in rows) == seen  # FIRE is needed all the same


def test_a_game_without_fire_or_lives_goes_through(make):
    env = make("Freeway", 2)
    rows = play(env, at_random(2, env.action_space.n), 60)
    assert not any(row[2].any() for row in rows)
    assert all((row[4] == -1).all() for row in rows)


def test_learners_get_signs_and_monitors_the_score(make):
    clipped = play(make("Asterix", 1), at_random(1, 9), 600)
    exact = play(make("Asterix", 1, clip_rewards=False), at_random(1, 9), 600)
    ours, theirs = (np.array([row[1][0] for row in rows]) for rows in (clipped, exact))
    assert theirs.max() >= 50
    assert np.array_equal(ours, np.sign(theirs))
    ends = [t for t, row in enumerate(clipped) if "episode" in row[3][0]]
    first, second, *_ = ends
    scores = [clipped[t][3][0]["episode"]["r"] for t in (first, second)]
    assert scores == [theirs[: first + 1].sum(), theirs[first + 1 : second + 1].sum()]
    assert min(scores) > 0


@pytest.mark.parametrize("backend", ["native", "sb3"])
def test_a_game_is_cut_off(backend, make):
    env = make("Freeway", 1, backend, max_frames=120)
    env.reset()
    steps = (env.step(np.zeros(1, int)) for _ in range(40))
    played, (observations, _, _, infos) = next(
        (t, step) for t, step in enumerate(steps, 1) if step[2][0]
    )
    assert 20 <= played <= 30  # the wrappers count no-ops, too
    assert infos[0]["TimeLimit.truncated"] is True
    assert "episode" in infos[0]
    assert not np.array_equal(infos[0]["terminal_observation"], observations[0])


def test_seeds_decide(make):
    one, same = (play(make("Breakout", 2, seed=7), at_random(2), 15) for _ in range(2))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(one, same, strict=True))
    first, second = (make("Breakout", 4, seed=seed).reset() for seed in (7, 8))
    assert np.array_equal(first[1:], second[:-1])
    assert not np.array_equal(first, second)


def test_seed_applies_to_the_next_reset(make):
    env = make("Breakout", 4, seed=3)
    first = play(env, at_random(4), 10)
    env.step_async(np.zeros(4, int))  # a reset forgets a step under way
    assert env.seed(3) == [3, 4, 5, 6]
    again = play(env, at_random(4), 10)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


def test_halves_are_the_whole(make):
    whole, divided = make("Breakout", 4), make("Breakout", 4)
    assert isinstance(divided, PairedAtariVecEnv)
    choose = at_random(4)
    rows = play(whole, choose, 40)
    divided.reset()
    first, second = divided.halves
    first.step_async(choose(0)[:2])
    for t, (observations, rewards, dones, infos, _) in enumerate(rows):
        second.step_async(choose(t)[2:])
        ones = first.step_wait()
        if t + 1 < len(rows):
            first.step_async(choose(t + 1)[:2])
        others = second.step_wait()
        assert np.array_equal(np.concatenate([ones[0], others[0]]), observations)
        assert np.array_equal(np.concatenate([ones[1], others[1]]), rewards)
        assert np.array_equal(np.concatenate([ones[2], others[2]]), dones)
        assert [set(info) for info in ones[3] + others[3]] == [set(info) for info in infos]
    assert make("Breakout", 3).halves is None


def test_an_interrupted_step_does_not_hang_what_follows(make, monkeypatch):
    """Python raises KeyboardInterrupt when the C++ call has returned: the step is taken then."""
    env = make("Breakout", 2)
    env.reset()
    for one in env.halves:
        receive = one._engine.recv

        def interrupted(receive=receive):
            receive()
            raise KeyboardInterrupt

        monkeypatch.setattr(one._engine, "recv", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            one.step(np.zeros(1, int))
        monkeypatch.undo()
        assert not one._pending
        one.reset()
    env.close()


def test_attributes(make):
    env = make("Breakout", 4)
    env.reset()
    assert env.get_attr("lives") == [5, 5, 5, 5]
    assert env.get_attr("lives", [1, 3]) == [5, 5]
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit, [2]) == [False]
    env.set_attr("colour", "red")
    assert env.get_attr("colour") == ["red"] * 4
    with pytest.raises(ValueError, match="all native games together"):
        env.set_attr("colour", "red", 0)
    with pytest.raises(AttributeError, match="no method 'jump'"):
        env.env_method("jump")
    env.close()
    env.close()


def test_evaluation_counts_games_not_lives(make):
    class Still:
        def predict(self, observations, **kwargs):
            return np.zeros(len(observations), np.int64), None

    scores, lengths = evaluate_policy(Still(), make("Breakout", 2), 2, return_episode_rewards=True)
    assert len(scores) == 2
    assert min(lengths) > 300  # five lives
