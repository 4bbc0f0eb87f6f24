"""Eight CPU devices and strict array rules for every test that uses jax. Must run before jax starts a backend."""

import gc
import importlib.util
import os

import pytest

# Triton has wheels for Linux alone. Elsewhere these are left out whole; on Linux nothing is.
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*.py", "test_compile_gpu.py", "test_kernel_report.py", "test_page_readers.py"]
    collect_ignore_glob += ["test_exchange.py", "test_gpu_check.py", "test_implementations.py", "test_memory.py"]
    collect_ignore_glob += ["test_overlap.py", "test_preflight.py", "test_relays.py", "test_schedule.py"]

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",  # a busy machine is not a hung one
])  # fmt: skip
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
gc.set_threshold(50_000, 20, 50)  # each collection walks all that was ever traced: a fifth of the tests' time

LONG = (
    "test_overlap.py::test_in_a_scan_over_layers_with_relays[checkpoint]",
    "test_overlap.py::test_in_a_scan_over_layers_with_relays[scan]",
    "test_overlap.py::test_in_a_scan_over_layers[checkpoint]",
    "test_overlap.py::test_in_a_scan_over_layers[scan]",
    "test_overlap.py::test_beside_weights_that_are_gathered_from_all_gpus[one level]",
    "test_overlap.py::test_alone_with_relays_both_exchanges_of_a_window_run_under_its_wave[5-4]",
    "test_overlap.py::test_alone_with_relays_both_exchanges_of_a_window_run_under_its_wave[4-1]",
    "test_overlap.py::test_alone_every_exchange_but_the_last_return_runs_under_a_wave[4-1]",
    "test_kernel_report.py::test_json_has_a_row_for_each_kernel_architecture_and_width",
    "test_packaging.py::test_editable_install_imports_from_the_sources",
    "test_compile_gpu.py::test_other_shapes_compile[changes1]",
    "test_compile_gpu.py::test_other_shapes_compile[changes2]",
    "test_compile_gpu.py::test_other_shapes_compile[changes3]",
    "test_compile_gpu.py::test_forward_and_backward_compile_with_three_kernels_a_wave[b200]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[relays, 5 waves]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[4 kv heads, 4 waves]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[relays, 3 waves]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[8B, nodes of 8]",
    "test_relays.py::test_relays_change_no_bit_of_output_and_dq_and_transports_none_at_all[five waves, two pools]",
    "test_relays.py::test_relays_change_no_bit_of_output_and_dq_and_transports_none_at_all[node holds CP groups]",
    "test_relays.py::test_relays_change_no_bit_of_output_and_dq_and_transports_none_at_all[CP group spans nodes]",
    "test_relays.py::test_compiled_collectives_stay_inside_the_pool_and_those_of_relays_inside_the_node[ppermute]",
    "test_exchange.py::test_ragged_in_a_scan_over_checkpointed_layers[None]",
    "test_exchange.py::test_transports_give_the_same_bits_for_every_policy_and_number_of_waves[4]",
    "test_exchange.py::test_ragged_and_padded_give_the_same_bits_for_other_shapes[bfloat16]",
    "test_exchange.py::test_ragged_and_padded_give_the_same_bits_for_other_shapes[odd widths]",
    "test_attention_fn.py::test_nnx_block_with_only_its_attention_fn_swapped[2]",
    "test_moe.py::test_the_work_is_that_of_the_chosen_experts[spread]",
    "test_moe.py::test_output_and_gradients_equal_the_dense_mixture[spread-2-2-2]",
    "test_moe.py::test_output_and_gradients_equal_the_dense_mixture[spread-4-2-1]",
    "test_hugging_face_write.py::test_a_process_that_is_killed_leaves_nothing_under_the_name",
    "test_hugging_face_write.py::test_two_processes_read_and_write_the_same",
    "test_hugging_face_write.py::test_a_host_holds_about_one_shard_beside_the_arrays",
    "test_data_benchmark.py::test_every_part_runs_small_and_reports",
    "test_multihost.py::test_four_processes_of_which_one_is_killed_and_then_one_hangs",
    "test_tensor_parallel.py::test_logits_equal_those_of_each_document_alone[dense-cp 2]",
    "test_tensor_parallel.py::test_logits_equal_those_of_each_document_alone[gathered experts-pools of 2]",
    "test_tensor_parallel.py::test_logits_equal_those_of_each_document_alone[gathered experts-cp 2]",
    "test_tensor_parallel.py::test_logits_equal_those_of_each_document_alone[spread experts-pools of 2]",
    "test_tensor_parallel.py::test_loss_and_gradients_are_those_without_it[gathered experts]",
    "test_pipeline.py::test_training_is_that_without_stages[experts, tp]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[context parallelism]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[one pool]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[tensor parallelism]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[pools, gpipe]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[experts spread over pools]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[pools]",
    "test_parallel_curves.py::test_every_layout_has_the_curve_of_plain_data_parallelism[pipeline]",
    "test_relays.py::test_relays_keep_to_their_room_and_the_rest_comes_from_home[0.5]",
    "test_relays.py::test_relays_keep_to_their_room_and_the_rest_comes_from_home[1.0]",
    "test_relays.py::test_relays_keep_to_their_room_and_the_rest_comes_from_home[0.0]",
    "test_relays.py::test_relays_change_no_bit_of_output_and_dq_and_transports_none_at_all[node is a CP group]",
    "test_run_records.py::test_evaluation_has_one_loss_on_every_mesh",
    "test_tensor_parallel.py::test_logits_equal_those_of_each_document_alone[spread experts-cp 2]",
    "test_tensor_parallel.py::test_loss_and_gradients_are_those_without_it[dense]",
    "test_pipeline.py::test_training_is_that_without_stages[four stages]",
    "test_overlap.py::test_in_a_scan_over_layers_with_relays[checkpoint that keeps the output]",
    "test_overlap.py::test_alone_every_exchange_but_the_last_return_runs_under_a_wave[5-4]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[1 wave]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[narrow values]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[4 waves, little room]",
    "test_compile_gpu.py::test_forward_and_backward_compile_with_three_kernels_a_wave[h200]",
    "test_exchange.py::test_ragged_and_padded_give_the_same_bits_for_other_shapes[window, two pools, explicit axes]",
    "test_exchange.py::test_transports_give_the_same_bits_for_every_policy_and_number_of_waves[2]",
    "test_train.py::test_experts_gathered_or_spread_give_one_curve",
    "test_tensor_parallel.py::test_loss_and_gradients_are_those_without_it[spread experts]",
    "test_relays.py::test_a_scan_over_checkpointed_layers_has_the_gradients_that_it_has_without_relays",
    "test_runs.py::test_a_run_goes_on_with_its_devices_in_another_layout",
    "test_mesh_benchmark.py::test_every_policy_is_right_and_has_a_row_of_times[every policy]",
    "test_processes.py::test_several_processes_give_the_bits_of_one[4 of 1 devices]",
    "test_attention.py::test_scan_and_checkpoint_over_layers",
    "test_attention.py::test_2_other_axes_of_the_mesh_take_no_part[last]",
    "test_gpu_check.py::test_what_measures_runs_on_a_cpu",
    "test_exchange.py::test_ragged_in_a_scan_over_checkpointed_layers[policy1]",
    "test_exchange.py::test_transports_give_the_same_bits_for_every_policy_and_number_of_waves[1]",
    "test_pipeline.py::test_sums_and_gradients_are_those_without_stages[4-9-1f1b]",
    "test_pipeline.py::test_sums_and_gradients_are_those_without_stages[4-3-1f1b]",
    "test_tensor_parallel.py::test_every_rank_works_on_its_own_heads_and_gives_their_bits[explicit]",
    "test_triton_plans.py::test_plans[100]",
    "test_triton_operator.py::test_the_same_bits_for_every_plan_and_mesh[changes2-random-options2]",
    "test_triton_operator.py::test_the_same_bits_for_every_plan_and_mesh[changes3-pooled-options3]",
    "test_overlap.py::test_alone_every_exchange_but_the_last_return_runs_under_a_wave[2-1]",
    "test_overlap.py::test_alone_every_exchange_but_the_last_return_runs_under_a_wave[3-4]",
    "test_memory.py::test_the_formula_is_what_xla_sets_aside[8B, 3 waves]",
    "test_moe.py::test_any_number_of_experts_and_choices[gathered-one]",
    "test_moe.py::test_any_number_of_experts_and_choices[gathered-all]",
    "test_libra_attention_layer.py::test_kernel_metadata_shards_parameters_and_changes_no_result[explicit]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[100-64-64-forward]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[100-64-64-dq]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[100-64-64-dkv]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[90-192-192-forward]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[90-192-192-dq]",
    "test_kernel_report.py::test_what_the_table_chooses_compiles_well[90-192-192-dkv]",
    "test_overlap.py::test_alone_with_relays_both_exchanges_of_a_window_run_under_its_wave[3-4]",
    "test_parity.py::test_packed_and_pooled_it_says_what_transformers_says_of_each_document[dense, 1 pool of 4]",
    "test_compile_gpu.py::test_pools_across_hosts_compile",
    "test_compile_gpu.py::test_a_checkpointed_layer_in_a_scan_compiles",
    "test_pipeline.py::test_sums_and_gradients_are_those_without_stages[2-5-1f1b]",
    "test_model.py::test_what_a_layer_keeps_for_the_backward_pass_changes_no_gradient",
)
"""Further variants of what stays, most of them whole programs compiled for GPUs: `make long` runs them. With them the
suite would take longer than its quarter of an hour on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in LONG:
            item.add_marker(pytest.mark.long)
            found.add(name)
    collected = {item.nodeid.removeprefix("tests/").partition("::")[0] for item in items}
    whole = {name for name in LONG if name.partition("::")[0] in collected}
    if len(items) > 2000 and found != whole:  # the whole suite: a name that is none any more is a mistake
        raise pytest.UsageError(f"tests/conftest.py names tests as long that are not there: {sorted(whole - found)}")
