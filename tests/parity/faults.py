"""All faults: importing this module fills the table."""

from tests.parity import (
    faults_of_deltas,
    faults_of_files,
    faults_of_formats,
    faults_of_layers,
    faults_of_pictures,
    faults_of_products,
    faults_of_serving,
)
from tests.parity.fault_table import FAULTS, Fault, build_spec, run_fault

__all__ = ["FAULTS", "Fault", "build_spec", "run_fault"]
MODULES = (
    faults_of_pictures,
    faults_of_layers,
    faults_of_deltas,
    faults_of_files,
    faults_of_formats,
    faults_of_products,
    faults_of_serving,
)
