"""Processors of pictures, a family a file: the table."""

from __future__ import annotations

from app.media.processors.base import Processor
from app.registry import Registry

PROCESSORS: Registry[type[Processor]] = Registry(
    "media processor",
    {
        "aya_vision": "app.media.processors.aya_vision:AyaVisionProcessor",
        "cohere2_vision": "app.media.processors.cohere2_vision:Cohere2VisionProcessor",
        "clip": "app.media.processors.clip:ClipProcessor",
        "clip_tower": "app.media.processors.clip_tower:ClipTowerProcessor",
        "gemma3": "app.media.processors.gemma3:Gemma3Processor",
        "gemma3n": "app.media.processors.gemma3n:Gemma3nProcessor",
        "gemma4": "app.media.processors.gemma4:Gemma4Processor",
        "glm_ocr": "app.media.processors.glm_ocr:GlmOcrProcessor",
        "idefics3": "app.media.processors.idefics3:Idefics3Processor",
        "internvl": "app.media.processors.internvl:InternVLProcessor",
        "internvl_chat": "app.media.processors.internvl_chat:InternVLChatProcessor",
        "kimi": "app.media.processors.kimi:KimiProcessor",
        "lfm2_vl": "app.media.processors.lfm2_vl:Lfm2VlProcessor",
        "lighton_ocr": "app.media.processors.lighton_ocr:LightOnOcrProcessor",
        "llama4": "app.media.processors.llama4:Llama4Processor",
        "llava_next": "app.media.processors.llava_next:LlavaNextProcessor",
        "llava_onevision": "app.media.processors.llava_onevision:LlavaOnevisionProcessor",
        "paddleocr_vl": "app.media.processors.paddleocr_vl:PaddleOcrVlProcessor",
        "phi4": "app.media.processors.phi4:Phi4Processor",
        "pixtral": "app.media.processors.pixtral:PixtralProcessor",
        "qwen_vl": "app.media.processors.qwen_vl:QwenVLProcessor",
    },
)
