"""Atari environments: what the learner sees, is told and plays, on both backends."""

import cv2
import gymnasium
import numpy as np
import pytest
from cases import slow
from stable_baselines3 import PPO
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecTransposeImage

from catnat.datamodules import atari, make_atari_vec_env
from catnat.datamodules.atari import game_name, game_names
from catnat.sb3 import HeadA2C, HeadPPO

NOOP, FIRE, RIGHT, LEFT = range(4)  # of Breakout


@pytest.fixture
def make():
    """make_atari_vec_env, with the environments closed at the end."""
    envs = []

    def make(game, num_envs, backend="native", **kwargs):
        envs.append(make_atari_vec_env(game, num_envs, backend, **kwargs))
        return envs[-1]

    yield make
    for env in envs:
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
        ("ALE/Breakout-v5", "breakout"),
        ("BreakoutNoFrameskip-v4", "breakout"),
        ("ALE/MsPacman-v5", "ms_pacman"),
    ],
)
def test_a_game_goes_by_many_names(name, rom):
    assert game_names()[game_name(name)] == rom


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Brekout", 2), "'Brekout' is not one of the 104 Atari games; did you mean Breakout?"),
        (("CartPole-v1", 2), "'CartPole-v1' is not one of"),
        (("Breakout", 0), "num_envs must be at least 1, got 0"),
        (("Breakout", 2, "envpool"), "unknown backend 'envpool'; choose from native, sb3"),
        (("Breakout", 2, "native", -1), "seed must lie in [0, "),
    ],
)
def test_what_cannot_be_made_is_said(arguments, words):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        make_atari_vec_env(*arguments)
    assert words in str(error.value)


# -- what both backends promise -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", slow("sb3")])
def test_the_contract_of_a_vector_environment_whose_layout_policies_take(backend, make):
    num_envs = 2
    env = make("Breakout", num_envs, backend)
    shape = (4, 84, 84) if backend == "native" else (84, 84, 4)
    assert env.observation_space.shape == shape
    assert env.action_space == gymnasium.spaces.Discrete(4)
    observations = env.reset()
    for _ in range(3):
        assert observations.shape == (num_envs, *shape)
        assert observations.dtype == np.uint8
        assert all(picture in env.observation_space for picture in observations)
        observations, rewards, dones, infos = env.step(np.zeros(num_envs, np.int64))
        assert rewards.shape == dones.shape == (num_envs,)
        assert (rewards.dtype, dones.dtype) == (np.float32, np.bool_)
        assert len(infos) == num_envs
    assert env.env_is_wrapped(Monitor) == [True] * num_envs
    assert env.get_attr("render_mode", [0]) in ([None], ["rgb_array"])
    assert env.has_attr("render_mode") and not env.has_attr("no_such_thing")
    model = PPO("CnnPolicy", env, n_steps=4, batch_size=8, n_epochs=1, device="cpu")
    assert model.get_env().observation_space.shape == (4, 84, 84)
    assert isinstance(model.get_env(), VecTransposeImage) == (backend == "sb3")
    model.learn(8)
    actions, _ = model.predict(env.reset(), deterministic=True)
    assert actions.shape == (2,)


def test_the_wrappers_are_the_default_and_native_games_print_their_differences_once(capsys):
    atari.say.cache_clear()
    wrapped = make_atari_vec_env("Breakout", 1)
    assert wrapped.observation_space.shape == (84, 84, 4)
    assert wrapped.env_is_wrapped(AtariWrapper) == [True]
    wrapped.close()
    assert capsys.readouterr().out == ""
    for _ in range(2):
        make_atari_vec_env("Breakout", 1, "native").close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("native games differ from Stable-Baselines3's wrappers")
    assert "HeadPPO or HeadA2C" in line


# -- the native backend ---------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["Breakout", slow("MsPacman")])  # whose ghosts flicker
def test_frames_and_rewards_are_those_of_the_game(game, make, monkeypatch):
    """Against the emulator one frame at a time: skip, gray, maximum of two, resize, stack."""
    monkeypatch.setattr(atari, "_NOOP_MAX", 0)
    env = make(game, 1)
    raw = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    raw.reset(seed=0)
    if game == "Breakout":
        raw.step(FIRE)  # as at a native reset
    first = env.reset()[0]
    assert not first[:3].any() and first[3].any()
    choose, total = at_random(1), 0
    for t in range(150):
        forced = int(env.forced_actions[0])
        played = forced if forced >= 0 else int(choose(t)[0])
        observations, rewards, _, _ = env.step(choose(t))
        grays, won = [], 0.0
        for _ in range(4):
            won += raw.step(played)[1]
            grays.append(raw.unwrapped.ale.getScreenGrayscale())
        gray = np.maximum(grays[2], grays[3])
        small = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)
        assert np.array_equal(observations[0, 3], small)
        assert rewards[0] == np.sign(won)
        total += rewards[0]
    assert total > 0
    raw.close()


@pytest.mark.parametrize(
    ("game", "noop_max", "frames"),
    [slow("Freeway", 3, {0, 1, 2}), ("Breakout", 3, {1, 2})],
)
def test_a_reset_plays_fewer_no_ops_than_noop_max_and_fire_in_place_of_the_last(
    game, noop_max, frames, make, monkeypatch
):
    monkeypatch.setattr(atari, "_NOOP_MAX", noop_max)
    env = make(game, 3)
    seen = set()
    for _ in range(6):
        env.reset()
        seen |= set(env._frames.tolist())
    assert seen == frames


def test_wrong_actions_are_refused_and_the_game_goes_on(make):
    env = make("Breakout", 2)
    env.reset()
    for actions in ([0, 4], [-1, 0], [0], [0.5, 0], None):
        with pytest.raises(ValueError, match=r"2 games need as many of Discrete\(4\), got"):
            env.step(actions)
    assert env.step(np.zeros(2, int))[0].shape == (2, 4, 84, 84)


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


def test_learners_get_signs_and_monitors_the_score(make):
    rows = play(make("Asterix", 1), at_random(1, 9), 600)
    clipped = np.array([row[1][0] for row in rows])
    assert set(clipped.tolist()) == {0, 1}
    first, second, *_ = [t for t, row in enumerate(rows) if "episode" in row[3][0]]
    scores = [rows[t][3][0]["episode"]["r"] for t in (first, second)]
    wins = [clipped[: first + 1].sum(), clipped[first + 1 : second + 1].sum()]
    assert scores == [50 * count for count in wins] and min(scores) > 0


@pytest.mark.parametrize("backend", ["native", "sb3"])
def test_a_game_is_cut_off(backend, make, monkeypatch):
    monkeypatch.setattr(atari, "_MAX_FRAMES", 120)
    env = make("Freeway", 1, backend)
    env.reset()
    steps = (env.step(np.zeros(1, int)) for _ in range(40))
    played, (observations, _, _, infos) = next(
        (t, step) for t, step in enumerate(steps, 1) if step[2][0]
    )
    assert 20 <= played <= 30  # the wrappers count no-ops, too
    assert infos[0]["TimeLimit.truncated"] is True
    assert "episode" in infos[0]
    assert not np.array_equal(infos[0]["terminal_observation"], observations[0])


@pytest.mark.slow
def test_seeds_decide(make):
    env = make("Breakout", 2, seed=7)
    rows = play(env, at_random(2), 15)
    env.step_async(np.zeros(2, int))  # a reset forgets a step under way
    assert env.seed(7) == [7, 8]
    for equal in (env, make("Breakout", 2, seed=7)):
        again = play(equal, at_random(2), 15)
        assert all(np.array_equal(a[0], b[0]) for a, b in zip(rows, again, strict=True))
    first, second = (make("Breakout", 2, seed=seed).reset() for seed in (7, 8))
    assert np.array_equal(first[1:], second[:-1])
    assert not np.array_equal(first, second)
    for _ in range(12):  # drawn, where none is given
        first, second = env.seed(None)
        assert second == first + 1 < 2**31  # what the emulator takes
    assert env.reset().shape == (2, 4, 84, 84)


@pytest.mark.parametrize("algorithm", [HeadPPO, slow(HeadA2C)])
def test_rollouts_have_the_actions_that_were_played(algorithm, make):
    env = make("Breakout", 2)
    played = []
    send = env._engine.send
    env._engine.send = lambda actions: (played.append(actions), send(actions))
    model = algorithm("CnnPolicy", env, n_steps=60, seed=0, device="cpu", gamma=0.5)
    if algorithm is HeadPPO:
        model.batch_size, model.n_epochs = 120, 1
    model.learn(120)
    actions = model.rollout_buffer.actions.reshape((2, 60) if algorithm is not HeadPPO else (60, 2))
    stored = actions if algorithm is HeadPPO else actions.T
    assert np.array_equal(stored, np.stack(played))


def test_an_interrupted_step_does_not_hang_what_follows(make, monkeypatch):
    """Python raises KeyboardInterrupt when the C++ call has returned: the step is taken then."""
    env = make("Breakout", 2)
    env.reset()
    receive = env._engine.recv

    def interrupted():
        receive()
        raise KeyboardInterrupt

    monkeypatch.setattr(env._engine, "recv", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2, int))
    monkeypatch.undo()
    env.reset()


def test_evaluation_counts_games_not_lives(make):
    class Still:
        def predict(self, observations, **kwargs):
            return np.zeros(len(observations), np.int64), None

    scores, lengths = evaluate_policy(Still(), make("Breakout", 2), 2, return_episode_rewards=True)
    assert len(scores) == 2
    assert min(lengths) > 300  # five lives
