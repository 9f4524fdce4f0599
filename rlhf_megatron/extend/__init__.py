"""What parts of a user's own import: `from rlhf_megatron.extend import ADV_ESTIMATORS,
AdvantageInputs`.

Names here stay when modules of the package are moved or renamed; docs/extending.md lists them. Each
is loaded when it is first used, so importing this package loads neither torch nor aiohttp, megatron
or transformers.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from rlhf_megatron.extend.door_names import DOOR_NAMES, FORMER_DOOR_NAMES

if TYPE_CHECKING:
    from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS as ANSWER_FORMATS
    from rlhf_megatron.agents.answer_formats.parsed_answer import AnswerFormat as AnswerFormat
    from rlhf_megatron.agents.answer_formats.parsed_answer import AnswerParts as AnswerParts
    from rlhf_megatron.agents.answer_formats.parsed_answer import BrokenCall as BrokenCall
    from rlhf_megatron.agents.answer_formats.parsed_answer import ParsedAnswer as ParsedAnswer
    from rlhf_megatron.agents.answer_formats.parsed_answer import ToolCall as ToolCall
    from rlhf_megatron.agents.calculator import calculate as calculate
    from rlhf_megatron.agents.environment import ENVIRONMENTS as ENVIRONMENTS
    from rlhf_megatron.agents.environment import Chat as Chat
    from rlhf_megatron.agents.environment import Environment as Environment
    from rlhf_megatron.agents.environment import EpisodeOver as EpisodeOver
    from rlhf_megatron.agents.environment import Observation as Observation
    from rlhf_megatron.agents.environment import Outcome as Outcome
    from rlhf_megatron.agents.environment import Task as Task
    from rlhf_megatron.agents.environment import Turn as Turn
    from rlhf_megatron.agents.environment import TurnEnvironment as TurnEnvironment
    from rlhf_megatron.agents.mcp_tools import McpServer as McpServer
    from rlhf_megatron.agents.mcp_tools import McpServerError as McpServerError
    from rlhf_megatron.agents.mcp_tools import list_mcp_tools as list_mcp_tools
    from rlhf_megatron.agents.tool_environment import ListedTools as ListedTools
    from rlhf_megatron.agents.tool_environment import ToolEnvironment as ToolEnvironment
    from rlhf_megatron.agents.tool_environment import make_tools as make_tools
    from rlhf_megatron.agents.tools import Tool as Tool
    from rlhf_megatron.agents.tools import ToolError as ToolError
    from rlhf_megatron.agents.tools import ToolLimits as ToolLimits
    from rlhf_megatron.agents.tools import ToolResult as ToolResult
    from rlhf_megatron.agents.tools import call_tool as call_tool
    from rlhf_megatron.agents.tools import make_tool as make_tool
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        ADV_ESTIMATORS as ADV_ESTIMATORS,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        AdvantageEstimator as AdvantageEstimator,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        AdvantageInputs as AdvantageInputs,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        AdvantageOutputs as AdvantageOutputs,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        GroupEstimator as GroupEstimator,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import RewardKeys as RewardKeys
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        compute_sample_rewards as compute_sample_rewards,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        count_response_tokens as count_response_tokens,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        find_true_positions as find_true_positions,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        register_group_estimator as register_group_estimator,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        repeat_per_sample_length as repeat_per_sample_length,
    )
    from rlhf_megatron.algorithms.advantages.advantage_estimator import (
        spread_over_response_tokens as spread_over_response_tokens,
    )
    from rlhf_megatron.algorithms.advantages.response_tokens import WHITEN_EPSILON as WHITEN_EPSILON
    from rlhf_megatron.algorithms.advantages.response_tokens import ResponseTokens as ResponseTokens
    from rlhf_megatron.algorithms.advantages.response_tokens import RunningMoments as RunningMoments
    from rlhf_megatron.algorithms.advantages.response_tokens import (
        compute_discounted_sums_ as compute_discounted_sums_,
    )
    from rlhf_megatron.algorithms.advantages.response_tokens import (
        whiten_advantages_ as whiten_advantages_,
    )
    from rlhf_megatron.algorithms.advantages.response_tokens import (
        whiten_sample_advantages as whiten_sample_advantages,
    )
    from rlhf_megatron.algorithms.distillation.distillation_loss import (
        DISTILLATION_LOSSES as DISTILLATION_LOSSES,
    )
    from rlhf_megatron.algorithms.distillation.distillation_loss import (
        DistillationLoss as DistillationLoss,
    )
    from rlhf_megatron.algorithms.distillation.distillation_loss import (
        DistillationParams as DistillationParams,
    )
    from rlhf_megatron.algorithms.distillation.distillation_loss import (
        normalize_top_k_log_probs as normalize_top_k_log_probs,
    )
    from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS as AGGREGATIONS
    from rlhf_megatron.algorithms.loss_aggregation import Aggregation as Aggregation
    from rlhf_megatron.algorithms.loss_aggregation import AggregationInputs as AggregationInputs
    from rlhf_megatron.algorithms.loss_aggregation import sum_by_sequence as sum_by_sequence
    from rlhf_megatron.algorithms.losses.importance_ratio import (
        check_clip_range as check_clip_range,
    )
    from rlhf_megatron.algorithms.losses.importance_ratio import (
        compute_clamped_log_ratio as compute_clamped_log_ratio,
    )
    from rlhf_megatron.algorithms.losses.importance_ratio import (
        compute_clipped_loss as compute_clipped_loss,
    )
    from rlhf_megatron.algorithms.losses.importance_ratio import (
        compute_sequence_ratio as compute_sequence_ratio,
    )
    from rlhf_megatron.algorithms.losses.importance_ratio import (
        make_ppo_kl_metric as make_ppo_kl_metric,
    )
    from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO as MAX_LOG_RATIO
    from rlhf_megatron.algorithms.losses.kl_estimators import KLType as KLType
    from rlhf_megatron.algorithms.losses.kl_estimators import (
        compute_kl_with_gradient as compute_kl_with_gradient,
    )
    from rlhf_megatron.algorithms.losses.kl_estimators import estimate_kl as estimate_kl
    from rlhf_megatron.algorithms.losses.policy_loss import PICKS as TOKEN_PICKS
    from rlhf_megatron.algorithms.losses.policy_loss import POLICY_LOSSES as POLICY_LOSSES
    from rlhf_megatron.algorithms.losses.policy_loss import PolicyLoss as PolicyLoss
    from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs as PolicyLossInputs
    from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossOutputs as PolicyLossOutputs
    from rlhf_megatron.algorithms.losses.policy_loss import TokenPick as TokenPick
    from rlhf_megatron.algorithms.losses.policy_loss import TokenPickInputs as TokenPickInputs
    from rlhf_megatron.algorithms.losses.policy_loss import attach_gradient as attach_gradient
    from rlhf_megatron.algorithms.losses.policy_loss import (
        mark_returns_gradient as mark_returns_gradient,
    )
    from rlhf_megatron.algorithms.losses.token_covariance import (
        check_token_share as check_token_share,
    )
    from rlhf_megatron.algorithms.losses.token_covariance import (
        compute_token_covariances as compute_token_covariances,
    )
    from rlhf_megatron.algorithms.losses.token_covariance import (
        count_picked_tokens as count_picked_tokens,
    )
    from rlhf_megatron.algorithms.losses.token_covariance import make_index_mask as make_index_mask
    from rlhf_megatron.algorithms.metric_names import make_single_key_part as make_single_key_part
    from rlhf_megatron.algorithms.preferences.preference_loss import (
        PREFERENCE_LOSSES as PREFERENCE_LOSSES,
    )
    from rlhf_megatron.algorithms.preferences.preference_loss import (
        PreferenceLossFunction as PreferenceLossFunction,
    )
    from rlhf_megatron.algorithms.preferences.preference_loss import (
        PreferenceLossOutputs as PreferenceLossOutputs,
    )
    from rlhf_megatron.algorithms.preferences.preference_loss import (
        PreferencePairs as PreferencePairs,
    )
    from rlhf_megatron.algorithms.prompt_groups import PromptGroups as PromptGroups
    from rlhf_megatron.algorithms.prompt_groups import (
        compute_group_advantages as compute_group_advantages,
    )
    from rlhf_megatron.algorithms.row_sequences import RowSequences as RowSequences
    from rlhf_megatron.config.rope import RotaryConfig as RotaryConfig
    from rlhf_megatron.config.rope import YarnScaling as YarnScaling
    from rlhf_megatron.config.rope import read_rotary_config as read_rotary_config
    from rlhf_megatron.config.schema import RolloutConfig as RolloutConfig
    from rlhf_megatron.controller.observe.line_file import LineFile as LineFile
    from rlhf_megatron.controller.observe.line_file import replace_non_finite as replace_non_finite
    from rlhf_megatron.controller.observe.loggers import LOGGERS as LOGGERS
    from rlhf_megatron.controller.observe.loggers import BatchView as BatchView
    from rlhf_megatron.controller.observe.loggers import RunLogger as RunLogger
    from rlhf_megatron.controller.observe.loggers import is_batch_view_step as is_batch_view_step
    from rlhf_megatron.controller.observe.loggers import load_or_draw_run_id as load_or_draw_run_id
    from rlhf_megatron.controller.observe.loggers import shorten_error_text as shorten_error_text
    from rlhf_megatron.controller.observe.report.run_files import HeldOutSample as HeldOutSample
    from rlhf_megatron.controller.observe.report.run_files import LoggedSample as LoggedSample
    from rlhf_megatron.controller.observe.report.run_files import MismatchStep as MismatchStep
    from rlhf_megatron.controller.observe.report.run_overview import (
        estimate_seconds_left as estimate_seconds_left,
    )
    from rlhf_megatron.controller.observe.report.run_overview import (
        format_duration as format_duration,
    )
    from rlhf_megatron.controller.observe.run_facts import RunFacts as RunFacts
    from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowEvent as FlowEvent
    from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowGroup as FlowGroup
    from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow as GroupFlow
    from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupStage as GroupStage
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        check_oversampling as check_oversampling,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        find_groups_past_lag as find_groups_past_lag,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        find_groups_to_annotate as find_groups_to_annotate,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        list_oldest_scored as list_oldest_scored,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        scale_by_oversampling as scale_by_oversampling,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        select_first_scored as select_first_scored,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        select_first_started as select_first_started,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        select_oldest as select_oldest,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        select_oldest_within_lag as select_oldest_within_lag,
    )
    from rlhf_megatron.controller.scheduler.schedules.group_selection import (
        sorted_group_numbers as sorted_group_numbers,
    )
    from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import (
        SCHEDULES as SCHEDULES,
    )
    from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import Schedule as Schedule
    from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import (
        StalePolicy as StalePolicy,
    )
    from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import (
        SyncPolicy as SyncPolicy,
    )
    from rlhf_megatron.data.codec import register as register_wire_class
    from rlhf_megatron.data.data_rows import ChatMessage as ChatMessage
    from rlhf_megatron.data.data_rows import Prompt as Prompt
    from rlhf_megatron.data.data_rows import PromptRow as PromptRow
    from rlhf_megatron.data.data_rows import TaskRows as TaskRows
    from rlhf_megatron.data.data_rows import has_json_label as has_json_label
    from rlhf_megatron.data.extra_columns import LeftOutColumnError as LeftOutColumnError
    from rlhf_megatron.data.extra_columns import parse_extra as parse_extra
    from rlhf_megatron.data.tasks import TASKS as TASKS
    from rlhf_megatron.data.tokenizer import Tokenizer as Tokenizer
    from rlhf_megatron.data.tokenizer import load_tokenizer as load_tokenizer
    from rlhf_megatron.plugins import list_loaded_plugins as list_loaded_plugins
    from rlhf_megatron.plugins import load_plugins as load_plugins
    from rlhf_megatron.ranks.resharding.weight_sender import SenderWorld as SenderWorld
    from rlhf_megatron.rewards.endpoint_replicas import ask_any_replica as ask_any_replica
    from rlhf_megatron.rewards.endpoint_replicas import compute_max_wait_s as compute_max_wait_s
    from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint as RewardEndpoint
    from rlhf_megatron.rewards.reward_endpoint import RewardEndpointAnswer as RewardEndpointAnswer
    from rlhf_megatron.rewards.reward_endpoint import RewardEndpointError as RewardEndpointError
    from rlhf_megatron.rewards.reward_endpoint import (
        RewardEndpointRefusedError as RewardEndpointRefusedError,
    )
    from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox as LocalSandbox
    from rlhf_megatron.rewards.sandbox.local_sandbox import SandboxSettings as SandboxSettings
    from rlhf_megatron.rewards.sandbox.long_integers import read_long_json as read_long_json
    from rlhf_megatron.rewards.sandbox.remote_sandbox import Protocol as RemoteSandboxProtocol
    from rlhf_megatron.rewards.sandbox.remote_sandbox import RemoteSandbox as RemoteSandbox
    from rlhf_megatron.rewards.sandbox.sandbox_layers import SandboxLimits as SandboxLimits
    from rlhf_megatron.rewards.sandbox.sandbox_protocol import ProgramResult as ProgramResult
    from rlhf_megatron.rewards.sandbox.sandbox_protocol import ProgramSandbox as ProgramSandbox
    from rlhf_megatron.rewards.sandbox.sandbox_protocol import SandboxProgram as SandboxProgram
    from rlhf_megatron.rewards.sandbox.sandbox_protocol import SandboxSession as SandboxSession
    from rlhf_megatron.rewards.sandbox.sandbox_protocol import (
        SandboxUnavailableError as SandboxUnavailableError,
    )
    from rlhf_megatron.rewards.scorers.answer_params import AnswerParams as AnswerParams
    from rlhf_megatron.rewards.scorers.answer_params import find_last_block as find_last_block
    from rlhf_megatron.rewards.scorers.answer_params import find_last_boxed as find_last_boxed
    from rlhf_megatron.rewards.scorers.answer_params import parse_answer as parse_answer
    from rlhf_megatron.rewards.scorers.code_comparison import ComparisonRule as ComparisonRule
    from rlhf_megatron.rewards.scorers.code_comparison import is_same_output as is_same_output
    from rlhf_megatron.rewards.scorers.code_comparison import (
        is_same_value as is_same_returned_value,
    )
    from rlhf_megatron.rewards.scorers.code_comparison import (
        read_returned_value as read_returned_value,
    )
    from rlhf_megatron.rewards.scorers.reward_types import MALFORMED as STATUS_MALFORMED
    from rlhf_megatron.rewards.scorers.reward_types import MAX_SCORE as MAX_SCORE
    from rlhf_megatron.rewards.scorers.reward_types import OK as STATUS_OK
    from rlhf_megatron.rewards.scorers.reward_types import OWN_PROCESS as OWN_PROCESS
    from rlhf_megatron.rewards.scorers.reward_types import REWARDS as REWARDS
    from rlhf_megatron.rewards.scorers.reward_types import TIMEOUT as STATUS_TIMEOUT
    from rlhf_megatron.rewards.scorers.reward_types import BadResultError as BadResultError
    from rlhf_megatron.rewards.scorers.reward_types import (
        LabelCheckingParams as LabelCheckingParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import (
        MemoryLimitedParams as MemoryLimitedParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import (
        PartialReadingParams as PartialReadingParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import (
        PatternSearchingParams as PatternSearchingParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import PreparedParams as PreparedParams
    from rlhf_megatron.rewards.scorers.reward_types import (
        ResponseReadingParams as ResponseReadingParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import ResultKeyParams as ResultKeyParams
    from rlhf_megatron.rewards.scorers.reward_types import Reward as Reward
    from rlhf_megatron.rewards.scorers.reward_types import RewardResult as RewardResult
    from rlhf_megatron.rewards.scorers.reward_types import RewardSample as RewardSample
    from rlhf_megatron.rewards.scorers.reward_types import (
        ServerWaitingParams as ServerWaitingParams,
    )
    from rlhf_megatron.rewards.scorers.reward_types import check_pattern as check_pattern
    from rlhf_megatron.rewards.scorers.reward_types import drop_stop_token as drop_stop_token
    from rlhf_megatron.rewards.scorers.reward_types import is_masked as is_masked
    from rlhf_megatron.rewards.scorers.reward_types import (
        make_bad_label_result as make_bad_label_result,
    )
    from rlhf_megatron.rewards.scorers.reward_types import make_masked_result as make_masked_result
    from rlhf_megatron.rewards.scorers.reward_types import read_response as read_response
    from rlhf_megatron.rewards.scorers.user_function import (
        import_user_function as import_user_function,
    )
    from rlhf_megatron.rollout.chunk_sizes import (
        divide_groups_into_chunks as divide_groups_into_chunks,
    )
    from rlhf_megatron.rollout.engine_interface import MEMORY_PARTS as MEMORY_PARTS
    from rlhf_megatron.rollout.engine_interface import UNSYNCED as UNSYNCED
    from rlhf_megatron.rollout.engine_interface import DriverLostError as DriverLostError
    from rlhf_megatron.rollout.engine_interface import EngineAddress as EngineAddress
    from rlhf_megatron.rollout.engine_interface import EngineError as EngineError
    from rlhf_megatron.rollout.engine_interface import EngineRequestError as EngineRequestError
    from rlhf_megatron.rollout.engine_interface import EngineStaleError as EngineStaleError
    from rlhf_megatron.rollout.engine_interface import EngineTimeoutError as EngineTimeoutError
    from rlhf_megatron.rollout.engine_interface import (
        EngineUnreachableError as EngineUnreachableError,
    )
    from rlhf_megatron.rollout.engine_interface import FinishReason as FinishReason
    from rlhf_megatron.rollout.engine_interface import GeneratedSample as GeneratedSample
    from rlhf_megatron.rollout.engine_interface import GenerateRequest as GenerateRequest
    from rlhf_megatron.rollout.engine_interface import InferenceEngine as InferenceEngine
    from rlhf_megatron.rollout.engine_interface import MemoryPart as MemoryPart
    from rlhf_megatron.rollout.engine_interface import PauseMode as PauseMode
    from rlhf_megatron.rollout.engine_interface import SampleGroups as SampleGroups
    from rlhf_megatron.rollout.engine_interface import SamplingParams as SamplingParams
    from rlhf_megatron.rollout.engine_interface import TokenColumn as TokenColumn
    from rlhf_megatron.rollout.engine_interface import VersionSpan as VersionSpan
    from rlhf_megatron.rollout.engine_interface import WeightTransport as WeightTransport
    from rlhf_megatron.rollout.engine_kinds import BALANCERS as BALANCERS
    from rlhf_megatron.rollout.engine_kinds import ENGINES as ENGINES
    from rlhf_megatron.rollout.engine_kinds import BalancerKind as BalancerKind
    from rlhf_megatron.rollout.engine_kinds import EngineKind as EngineKind
    from rlhf_megatron.rollout.engine_kinds import LocalEngineKind as LocalEngineKind
    from rlhf_megatron.rollout.engine_kinds import SGLangEngineKind as SGLangEngineKind
    from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog as EngineCallLog
    from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup as EngineSetup
    from rlhf_megatron.rollout.fleet.engine_supervisor import FleetMember as FleetMember
    from rlhf_megatron.rollout.fleet.engine_supervisor import MemberState as MemberState
    from rlhf_megatron.rollout.fleet.request_balancer import ChunkAssignment as ChunkAssignment
    from rlhf_megatron.rollout.fleet.request_balancer import (
        LeastOutstandingBalancer as LeastOutstandingBalancer,
    )
    from rlhf_megatron.rollout.fleet.request_balancer import OutstandingLoad as OutstandingLoad
    from rlhf_megatron.rollout.fleet.request_balancer import RequestBalancer as RequestBalancer
    from rlhf_megatron.rollout.fleet.request_balancer import RequestChunk as RequestChunk
    from rlhf_megatron.rollout.fleet.request_balancer import (
        compute_session_sample_limit as compute_session_sample_limit,
    )
    from rlhf_megatron.rollout.fleet.request_balancer import cut_chunks as cut_chunks
    from rlhf_megatron.rollout.fleet.server_process import LOOPBACK as LOOPBACK
    from rlhf_megatron.rollout.fleet.server_process import EngineServers as EngineServers
    from rlhf_megatron.rollout.fleet.server_process import LaunchPlacement as LaunchPlacement
    from rlhf_megatron.rollout.fleet.server_process import ServerLaunch as ServerLaunch
    from rlhf_megatron.rollout.fleet.server_process import ServerProcess as ServerProcess
    from rlhf_megatron.rollout.fleet.server_process import (
        ServerProcessHandle as ServerProcessHandle,
    )
    from rlhf_megatron.rollout.fleet.server_process import ServerSeat as ServerSeat
    from rlhf_megatron.rollout.fleet.server_process import StartProgress as StartProgress
    from rlhf_megatron.rollout.fleet.server_process import await_server_ready as await_server_ready
    from rlhf_megatron.rollout.fleet.server_process import launch_here as launch_here
    from rlhf_megatron.rollout.fleet.server_process import write_token_file as write_token_file
    from rlhf_megatron.rollout.fleet.server_watch import ServerWatch as ServerWatch
    from rlhf_megatron.rollout.generate_gate import GenerateGate as GenerateGate
    from rlhf_megatron.rollout.generation_queries import GenerationQuery as GenerationQuery
    from rlhf_megatron.rollout.generation_queries import send_query as send_query
    from rlhf_megatron.rollout.http_client import HttpAnswer as HttpAnswer
    from rlhf_megatron.rollout.http_client import HttpClient as HttpClient
    from rlhf_megatron.rollout.http_client import run_in_event_loop as run_in_event_loop
    from rlhf_megatron.rollout.http_client import start_in_event_loop as start_in_event_loop
    from rlhf_megatron.rollout.local.local_client import LocalEngine as LocalEngine
    from rlhf_megatron.rollout.sglang.attached_engines import AttachedEngines as AttachedEngines
    from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine as SGLangEngine
    from rlhf_megatron.rollout.transports.bucket_transport import BucketTransport as BucketTransport
    from rlhf_megatron.rollout.transports.bucket_transport import DeliveryTraffic as DeliveryTraffic
    from rlhf_megatron.rollout.transports.disk_transport import (
        SGLangDiskTransport as SGLangDiskTransport,
    )
    from rlhf_megatron.rollout.transports.link_transport import EngineLinkVerbs as EngineLinkVerbs
    from rlhf_megatron.rollout.transports.link_transport import LocalLinkVerbs as LocalLinkVerbs
    from rlhf_megatron.rollout.transports.link_transport import SGLangLinkVerbs as SGLangLinkVerbs
    from rlhf_megatron.rollout.transports.process_group_transport import (
        EngineProcessGroups as EngineProcessGroups,
    )
    from rlhf_megatron.rollout.transports.process_group_transport import (
        ProcessGroupTransport as ProcessGroupTransport,
    )
    from rlhf_megatron.rollout.transports.tensor_transport import (
        FileBucketTransport as FileBucketTransport,
    )
    from rlhf_megatron.rollout.transports.tensor_transport import (
        LocalTensorTransport as LocalTensorTransport,
    )
    from rlhf_megatron.rollout.transports.tensor_transport import (
        SGLangTensorTransport as SGLangTensorTransport,
    )
    from rlhf_megatron.weights.bucket_manifest import BucketManifest as BucketManifest
    from rlhf_megatron.weights.bucket_manifest import TensorEntry as TensorEntry
    from rlhf_megatron.weights.families.decoder_family import AttentionWindow as AttentionWindow
    from rlhf_megatron.weights.families.decoder_family import DecoderDimensions as DecoderDimensions
    from rlhf_megatron.weights.families.decoder_family import (
        make_decoder_family as make_decoder_family,
    )
    from rlhf_megatron.weights.families.decoder_family import (
        read_decoder_dimensions as read_decoder_dimensions,
    )
    from rlhf_megatron.weights.families.expert_layers import ExpertLayers as ExpertLayers
    from rlhf_megatron.weights.families.expert_layers import find_unknown_keys as find_unknown_keys
    from rlhf_megatron.weights.families.expert_layers import (
        find_unsupported_sigmoid_settings as find_unsupported_sigmoid_settings,
    )
    from rlhf_megatron.weights.families.expert_layers import (
        make_expert_arguments as make_expert_arguments,
    )
    from rlhf_megatron.weights.families.expert_layers import make_expert_name as make_expert_name
    from rlhf_megatron.weights.families.expert_layers import make_expert_rules as make_expert_rules
    from rlhf_megatron.weights.families.expert_layers import (
        make_sigmoid_router_arguments as make_sigmoid_router_arguments,
    )
    from rlhf_megatron.weights.families.expert_layers import (
        read_expert_layers as read_expert_layers,
    )
    from rlhf_megatron.weights.families.family_lookup import (
        refuse_unsupported_settings as refuse_unsupported_settings,
    )
    from rlhf_megatron.weights.families.latent_attention import LATENT_KEYS as LATENT_ATTENTION_KEYS
    from rlhf_megatron.weights.families.latent_attention import (
        LatentAttentionDimensions as LatentAttentionDimensions,
    )
    from rlhf_megatron.weights.families.latent_attention import (
        find_unsupported_latent_settings as find_unsupported_latent_settings,
    )
    from rlhf_megatron.weights.families.latent_attention import (
        make_latent_arguments as make_latent_arguments,
    )
    from rlhf_megatron.weights.families.latent_attention import (
        make_latent_rules as make_latent_rules,
    )
    from rlhf_megatron.weights.families.latent_attention import (
        read_latent_dimensions as read_latent_dimensions,
    )
    from rlhf_megatron.weights.families.model_family import FAMILIES as FAMILIES
    from rlhf_megatron.weights.families.model_family import HFConfig as HFConfig
    from rlhf_megatron.weights.families.model_family import ModelFamily as ModelFamily
    from rlhf_megatron.weights.families.model_family import read_positive_int as read_positive_int
    from rlhf_megatron.weights.weight_table import HFTensor as HFTensor
    from rlhf_megatron.weights.weight_table import LayerPart as LayerPart
    from rlhf_megatron.weights.weight_table import StackedEntry as StackedEntry
    from rlhf_megatron.weights.weight_table import StageOwner as StageOwner
    from rlhf_megatron.weights.weight_table import TensorSplit as TensorSplit
    from rlhf_megatron.weights.weight_table import WeightRule as WeightRule
    from rlhf_megatron.weights.weight_table import concatenate_tensors as concatenate_tensors
    from rlhf_megatron.weights.weight_table import make_plain_rule as make_plain_rule
    from rlhf_megatron.weights.weight_table import split_into_halves as split_into_halves
    from rlhf_megatron.write_errors import write_text_file as write_text_file

__all__ = [
    "ADV_ESTIMATORS",
    "AGGREGATIONS",
    "ANSWER_FORMATS",
    "BALANCERS",
    "DISTILLATION_LOSSES",
    "ENGINES",
    "ENVIRONMENTS",
    "FAMILIES",
    "LATENT_ATTENTION_KEYS",
    "LOGGERS",
    "LOOPBACK",
    "MAX_LOG_RATIO",
    "MAX_SCORE",
    "MEMORY_PARTS",
    "OWN_PROCESS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "REWARDS",
    "SCHEDULES",
    "STATUS_MALFORMED",
    "STATUS_OK",
    "STATUS_TIMEOUT",
    "TASKS",
    "TOKEN_PICKS",
    "UNSYNCED",
    "WHITEN_EPSILON",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Aggregation",
    "AggregationInputs",
    "AnswerFormat",
    "AnswerParams",
    "AnswerParts",
    "AttachedEngines",
    "AttentionWindow",
    "BadResultError",
    "BalancerKind",
    "BatchView",
    "BrokenCall",
    "BucketManifest",
    "BucketTransport",
    "Chat",
    "ChatMessage",
    "ChunkAssignment",
    "ComparisonRule",
    "DecoderDimensions",
    "DeliveryTraffic",
    "DistillationLoss",
    "DistillationParams",
    "DriverLostError",
    "EngineAddress",
    "EngineCallLog",
    "EngineError",
    "EngineKind",
    "EngineLinkVerbs",
    "EngineProcessGroups",
    "EngineRequestError",
    "EngineServers",
    "EngineSetup",
    "EngineStaleError",
    "EngineTimeoutError",
    "EngineUnreachableError",
    "Environment",
    "EpisodeOver",
    "ExpertLayers",
    "FileBucketTransport",
    "FinishReason",
    "FleetMember",
    "FlowEvent",
    "FlowGroup",
    "GenerateGate",
    "GenerateRequest",
    "GeneratedSample",
    "GenerationQuery",
    "GroupEstimator",
    "GroupFlow",
    "GroupStage",
    "HFConfig",
    "HFTensor",
    "HeldOutSample",
    "HttpAnswer",
    "HttpClient",
    "InferenceEngine",
    "KLType",
    "LabelCheckingParams",
    "LatentAttentionDimensions",
    "LaunchPlacement",
    "LayerPart",
    "LeastOutstandingBalancer",
    "LeftOutColumnError",
    "LineFile",
    "ListedTools",
    "LocalEngine",
    "LocalEngineKind",
    "LocalLinkVerbs",
    "LocalSandbox",
    "LocalTensorTransport",
    "LoggedSample",
    "McpServer",
    "McpServerError",
    "MemberState",
    "MemoryLimitedParams",
    "MemoryPart",
    "MismatchStep",
    "ModelFamily",
    "Observation",
    "Outcome",
    "OutstandingLoad",
    "ParsedAnswer",
    "PartialReadingParams",
    "PatternSearchingParams",
    "PauseMode",
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutputs",
    "PreferenceLossFunction",
    "PreferenceLossOutputs",
    "PreferencePairs",
    "PreparedParams",
    "ProcessGroupTransport",
    "ProgramResult",
    "ProgramSandbox",
    "Prompt",
    "PromptGroups",
    "PromptRow",
    "RemoteSandbox",
    "RemoteSandboxProtocol",
    "RequestBalancer",
    "RequestChunk",
    "ResponseReadingParams",
    "ResponseTokens",
    "ResultKeyParams",
    "Reward",
    "RewardEndpoint",
    "RewardEndpointAnswer",
    "RewardEndpointError",
    "RewardEndpointRefusedError",
    "RewardKeys",
    "RewardResult",
    "RewardSample",
    "RolloutConfig",
    "RotaryConfig",
    "RowSequences",
    "RunFacts",
    "RunLogger",
    "RunningMoments",
    "SGLangDiskTransport",
    "SGLangEngine",
    "SGLangEngineKind",
    "SGLangLinkVerbs",
    "SGLangTensorTransport",
    "SampleGroups",
    "SamplingParams",
    "SandboxLimits",
    "SandboxProgram",
    "SandboxSession",
    "SandboxSettings",
    "SandboxUnavailableError",
    "Schedule",
    "SenderWorld",
    "ServerLaunch",
    "ServerProcess",
    "ServerProcessHandle",
    "ServerSeat",
    "ServerWaitingParams",
    "ServerWatch",
    "StackedEntry",
    "StageOwner",
    "StalePolicy",
    "StartProgress",
    "SyncPolicy",
    "Task",
    "TaskRows",
    "TensorEntry",
    "TensorSplit",
    "TokenColumn",
    "TokenPick",
    "TokenPickInputs",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "ToolLimits",
    "ToolResult",
    "Turn",
    "TurnEnvironment",
    "VersionSpan",
    "WeightRule",
    "WeightTransport",
    "YarnScaling",
    "ask_any_replica",
    "attach_gradient",
    "await_server_ready",
    "calculate",
    "call_tool",
    "check_clip_range",
    "check_oversampling",
    "check_pattern",
    "check_token_share",
    "compute_clamped_log_ratio",
    "compute_clipped_loss",
    "compute_discounted_sums_",
    "compute_group_advantages",
    "compute_kl_with_gradient",
    "compute_max_wait_s",
    "compute_sample_rewards",
    "compute_sequence_ratio",
    "compute_session_sample_limit",
    "compute_token_covariances",
    "concatenate_tensors",
    "count_picked_tokens",
    "count_response_tokens",
    "cut_chunks",
    "divide_groups_into_chunks",
    "drop_stop_token",
    "estimate_kl",
    "estimate_seconds_left",
    "find_groups_past_lag",
    "find_groups_to_annotate",
    "find_last_block",
    "find_last_boxed",
    "find_true_positions",
    "find_unknown_keys",
    "find_unsupported_latent_settings",
    "find_unsupported_sigmoid_settings",
    "format_duration",
    "has_json_label",
    "import_user_function",
    "is_batch_view_step",
    "is_masked",
    "is_same_output",
    "is_same_returned_value",
    "launch_here",
    "list_loaded_plugins",
    "list_mcp_tools",
    "list_oldest_scored",
    "load_or_draw_run_id",
    "load_plugins",
    "load_tokenizer",
    "make_bad_label_result",
    "make_decoder_family",
    "make_expert_arguments",
    "make_expert_name",
    "make_expert_rules",
    "make_index_mask",
    "make_latent_arguments",
    "make_latent_rules",
    "make_masked_result",
    "make_plain_rule",
    "make_ppo_kl_metric",
    "make_sigmoid_router_arguments",
    "make_single_key_part",
    "make_tool",
    "make_tools",
    "mark_returns_gradient",
    "normalize_top_k_log_probs",
    "parse_answer",
    "parse_extra",
    "read_decoder_dimensions",
    "read_expert_layers",
    "read_latent_dimensions",
    "read_long_json",
    "read_positive_int",
    "read_response",
    "read_returned_value",
    "read_rotary_config",
    "refuse_unsupported_settings",
    "register_group_estimator",
    "register_wire_class",
    "repeat_per_sample_length",
    "replace_non_finite",
    "run_in_event_loop",
    "scale_by_oversampling",
    "select_first_scored",
    "select_first_started",
    "select_oldest",
    "select_oldest_within_lag",
    "send_query",
    "shorten_error_text",
    "sorted_group_numbers",
    "split_into_halves",
    "spread_over_response_tokens",
    "start_in_event_loop",
    "sum_by_sequence",
    "whiten_advantages_",
    "whiten_sample_advantages",
    "write_text_file",
    "write_token_file",
]


def __getattr__(name: str) -> Any:
    if name in FORMER_DOOR_NAMES:
        former = FORMER_DOOR_NAMES[name]
        warnings.warn(
            f"rlhf_megatron.extend.{name} is {former.name} now, and {name} is removed in"
            f" {former.removed_in}; import {former.name}.",
            FutureWarning,  # which Python shows to users, unlike DeprecationWarning
            stacklevel=2,
        )
        name = former.name
    if name not in DOOR_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    entry = DOOR_NAMES[name]
    value = getattr(importlib.import_module(entry.module), entry.attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
